"""Every missed target is explained, and none is that is met."""

from __future__ import annotations

import re
from collections import Counter

from bench.machine import RESULTS
from bench.measured import read_all
from bench.report import DOCS

_EXPLAINED = re.compile(r"^- `(.+)`$", re.MULTILINE)


def test_the_missed_targets_and_no_others_are_explained() -> None:
    missed = [target.name for one in read_all(RESULTS) for target in one.results.targets if not target.met]
    explained = _EXPLAINED.findall((DOCS / "missed-targets.md").read_text())
    assert Counter(explained) == Counter(missed)
    assert missed, "then the page can go"
