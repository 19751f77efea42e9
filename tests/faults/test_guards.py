"""Every guard switched off, one at a time: the tests that are named for it must fail, all of them, and by assertion.

A test that passes with and without its guard is reported here by its name. That the same tests pass with all guards on
is what the rest of the suite says; that they do in such a process, too, is the control, for others in every run.
"""

from __future__ import annotations

import random

import pytest

from tests.draws import draws
from tests.faults.guards import GUARDS
from tests.faults.guards_run import BY_ASSERTION, PASSED, outcomes
from tests.faults.switches import Guard
from tests.promises import NUMBERS


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.key for guard in GUARDS])
def test_without_a_guard_its_tests_fail(guard: Guard) -> None:
    found = outcomes(guard.tests, guard.key)
    useless = [test for test, outcome in found.items() if outcome == PASSED]
    assert not useless, f"pass although this is off: {guard.text}"
    assert found
    assert set(found.values()) == {BY_ASSERTION}, found
    run = {test.partition("[")[0] for test in found}
    assert run == {test.partition("[")[0] for test in guard.tests}


def test_with_all_guards_on_they_pass_in_such_a_process(run_seed: int) -> None:
    quick = {
        test for guard in GUARDS for test in guard.tests if "engine_core" not in test
    }
    chosen = random.Random(run_seed).sample(sorted(quick), draws(len(quick)))
    found = outcomes(sorted(chosen))
    assert set(found.values()) == {PASSED}, {
        test: text for test, text in found.items() if text != PASSED
    }
    assert len(found) >= len(chosen)


def test_every_promise_has_a_guard() -> None:
    assert {promise for guard in GUARDS for promise in guard.promises} == set(NUMBERS)
    assert len({guard.key for guard in GUARDS}) == len(GUARDS)
