"""The next vLLM in an ordinary run: its contract, where the environment was built; and how a whole run is judged."""

from __future__ import annotations

import pytest

from tests.next_vllm import build
from tests.next_vllm.cannot_run import CannotRun
from tests.next_vllm.run import problems, run, summary

CONTRACT = "tests/engine_core/test_contract.py"
NAMED = CannotRun("tests/connector/test_a.py::test_x", "no kernel", "a kernel")


def outcome(name: str, error: str = "") -> dict[str, object]:
    return {"outcome": name, "error": error, "seconds": 1.0}


def test_the_contract_holds_under_the_next_vllm() -> None:
    if not build.is_current():
        pytest.skip(f"NO NEXT VLLM: `{build.COMMAND}` builds it (340 MB, once)")
    found = run([CONTRACT])
    assert len(found) > 5
    assert problems(found, ()) == []


def test_a_test_may_fail_only_as_it_is_said_to() -> None:
    failed = outcome("failed", "RuntimeError: no kernel for this")
    found = {f"{NAMED.tests}[1]": failed, f"{CONTRACT}::test_y": outcome("passed")}
    assert problems(found, (NAMED,)) == []
    assert len(problems(found, ())) == 1
    other = {f"{NAMED.tests}[1]": outcome("failed", "AssertionError")}
    assert problems(other, (NAMED,)) == [
        f"{NAMED.tests}[1] failed: AssertionError",
    ]


def test_a_test_that_is_said_to_fail_and_passes_is_a_problem() -> None:
    found = {f"{NAMED.tests}[1]": outcome("passed")}
    (text,) = problems(found, (NAMED,))
    assert "can run now" in text
    assert problems({f"{CONTRACT}::test_y": outcome("passed")}, (NAMED,)) == []


def test_tests_are_counted_by_folder_and_outcome() -> None:
    found = {
        f"{CONTRACT}::test_y": outcome("passed"),
        f"{CONTRACT}::test_z": outcome("skipped"),
        f"{NAMED.tests}[1]": outcome("failed"),
    }
    assert summary(found) == {
        "tests/engine_core": {"passed": 1, "skipped": 1},
        "tests/connector": {"failed": 1},
    }
