"""Every promise of docs/reliability.md has tests, and the page names none that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, ROOT
from tests.promises import NUMBERS, marked_tests, promise

_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def test_every_promise_has_at_least_three_tests() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    written = re.findall(r"^(\d)\. \*\*", page, re.MULTILINE)
    assert [int(number) for number in written] == list(NUMBERS)
    counts = {
        number: sum(len(tests) for tests in files.values())
        for number, files in marked_tests().items()
    }
    assert {number: count for number, count in counts.items() if count < 3} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_tests_that_exist(page: Path) -> None:
    named = set(_TEST.findall(page.read_text()))
    gone = [
        f"{path}::{test}"
        for path, test in sorted(named)
        if not (ROOT / path).is_file() or (test and test not in names_of(ROOT / path))
    ]
    assert gone == []


def names_of(path: Path) -> set[str]:
    return {
        statement.name
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.FunctionDef)
    }


@pytest.mark.parametrize("numbers", [(), (0,), (1, 10)])
def test_a_mark_of_no_promise_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of 1 to 9"):
        promise(*numbers)
