"""Which tests keep which of the nine promises of docs/reliability.md.

    @promise(1, 2)
    def test_…

marks a test that fails without promise 1, and without promise 2. `python -m scripts.generate_docs` makes the page's
table of these marks, so it names no test that is gone. Tests of a guard (`tests.faults.guards`) need no mark: the
guard has its promises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
NUMBERS = range(1, 10)


def promise(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test that fails without each of these promises.

    Raises:
        ValueError: there is no such promise, or none is named.
    """
    unknown = set(numbers).difference(NUMBERS)
    if unknown or not numbers:
        raise ValueError(
            f"promises {numbers}; expected some of {NUMBERS[0]} to {NUMBERS[-1]}"
        )
    return pytest.mark.promise(*numbers)


def marked_tests() -> dict[int, dict[str, list[str]]]:
    """Names of the marked tests of every promise, by the path of their module.

    Read from the sources: importing the modules would need vLLM, and seconds.
    """
    found: dict[int, dict[str, list[str]]] = {number: {} for number in NUMBERS}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if "@promise(" not in source:
            continue
        module = path.relative_to(TESTS.parent).as_posix()
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.FunctionDef):
                for number in _promises_of(statement):
                    found[number].setdefault(module, []).append(statement.name)
    return found


def _promises_of(test: ast.FunctionDef) -> Iterator[int]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "promise":
            yield from (ast.literal_eval(number) for number in mark.args)
