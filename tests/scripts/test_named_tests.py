"""The tests that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("docs/*.md"))
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for file, name in _NAMED.findall(page.read_text()):
        assert (ROOT / file).is_file(), file
        assert not name or f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_model_kind_names_a_test_and_its_date() -> None:
    _, _, section = (ROOT / "docs/compatibility.md").read_text().partition("## Model kinds\n")
    rows = [line.split(" | ") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for kind, _, test, date in rows:
        assert _NAMED.fullmatch(test), kind
        assert re.match(r"(20\d\d-\d\d-\d\d|not yet on an engine) \|$", date), kind
