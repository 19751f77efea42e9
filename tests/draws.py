"""How much of its cases a random or parametrized test has: a part in a usual run, all of them in a full one.

Each run draws other cases (`tests/seeds.py`), so what one leaves out others have; `just full` and every night have all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest

from tests import seeds

VARIABLE = "KVFERRY_DRAWS"
USUAL_SHARE = 0.4
FEWEST = 10
_MARK = "usual_cases"


def draws(full: int) -> int:
    """The number for this run, of a test whose full number is `full`."""
    return max(min(full, FEWEST), round(_share() * full))


def usual_cases(count: int) -> pytest.MarkDecorator:
    """Mark a parametrized test: a usual run has so many of its cases, drawn by the run's seed. Tests of one module
    whose cases have the same names draw the same ones.

    For cases that are slow and much alike: no promise may rest on one that a run leaves out. A test of 0 cases is one
    of every night.
    """
    return pytest.mark.usual_cases(count)


def leave_cases_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that this run did not draw, unless tests are named one by one."""
    if _share() >= 1 or any("::" in argument for argument in config.args):
        return
    names: dict[tuple[str, str], set[str]] = {}
    for item in items:
        if item.get_closest_marker(_MARK):
            names.setdefault(_test_of(item), set()).add(_case_of(item))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker(_MARK)
        if mark is None:
            kept.append(item)
            continue
        module, _ = _test_of(item)
        drawn = draw(names[_test_of(item)], mark.args[0], module)
        (kept if _case_of(item) in drawn else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def draw(names: Iterable[str], count: int, key: str) -> set[str]:
    """So many of the names, by the run's seed and this key."""
    all_names = sorted(set(names))
    chooser = random.Random(f"{seeds.seed_of_this_run()} {key}")
    return set(chooser.sample(all_names, min(count, len(all_names))))


def _share() -> float:
    return float(os.environ.get(VARIABLE, USUAL_SHARE))


def _test_of(item: pytest.Item) -> tuple[str, str]:
    """The test's module, and its name without a case."""
    module, _, name = item.nodeid.partition("::")
    return module, name.partition("[")[0]


def _case_of(item: pytest.Item) -> str:
    """The name of the case; empty for a test that has no cases."""
    return item.name.partition("[")[2]
