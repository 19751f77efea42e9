"""docs/missed-targets.md explains every target that was missed, and none that is met."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from bench.machine import RESULTS
from bench.measured import read_all
from bench.report import DOCS

from tests.bench.test_performance_page import sample

_SECTION = re.compile(
    r"^## .+\n\n(?:Measured in \[(?P<published>\w+)\]|\[No published run\]\(.+?\) of (?P<unpublished>\w+))",
    re.MULTILINE,
)
_EXPLAINED = re.compile(r"^- `(.+)`$", re.MULTILINE)


def problems(page: str, results: Path) -> list[str]:
    """In words, where the page is not about what was missed."""
    found: list[str] = []
    missed = {
        one.name: Counter(target.name for target in one.results.targets if not target.met) for one in read_all(results)
    }
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    explained: dict[str, Counter[str]] = {}
    for part in parts:
        head = _SECTION.match(part)
        if head is None:
            found.append(f"{part.splitlines()[0]!r} does not name its benchmark")
            continue
        name = head["published"] or head["unpublished"]
        if (head["published"] is not None) != (name in missed):
            found.append(f"{name}: there is {'a' if name in missed else 'no'} published run")
        if name in missed:
            explained[name] = Counter(_EXPLAINED.findall(part))
    for name, targets in missed.items():
        listed = explained.get(name, Counter())
        found += [f"{name}: {target!r} was missed and is not explained" for target in (targets - listed).elements()]
        found += [f"{name}: {target!r} is explained and was not missed" for target in (listed - targets).elements()]
    return found


def test_the_missed_targets_and_no_others_are_explained() -> None:
    assert problems((DOCS / "missed-targets.md").read_text(), RESULTS) == []


PUBLISHED = "## Steps\n\nMeasured in [sample](performance.md#sample).\n\n"
UNPUBLISHED = "## Steps\n\n[No published run](performance.md#no-published-run) of sample.\n\n"


@pytest.mark.parametrize(
    ("page", "is_published", "problem"),
    [
        (PUBLISHED + "- `growth`\n", True, None),
        (PUBLISHED, True, "'growth' was missed"),
        ("", True, "'growth' was missed"),
        (PUBLISHED + "- `growth`\n- `p99`\n", True, "'p99' is explained"),
        (UNPUBLISHED + "- `growth`\n", True, "there is a published run"),
        (PUBLISHED + "- `growth`\n", False, "there is no published run"),
        (UNPUBLISHED + "- `growth`\n", False, None),
        ("## Steps\n\n- `growth`\n", True, "does not name its benchmark"),
    ],
)
def test_a_page_that_is_not_about_the_results_is_found(
    page: str, is_published: bool, problem: str | None, tmp_path: Path
) -> None:
    if is_published:
        sample(tmp_path)
    found = "; ".join(problems(page, tmp_path))
    assert (found == "") == (problem is None)
    assert (problem or "") in found
