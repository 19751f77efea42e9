"""The pages against the tree: folders, files, functions, threads and tests that they name."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from tests.packaging.outside import PACKAGES

ARCHITECTURE, DESIGN = ROOT / "docs" / "architecture.md", ROOT / "docs" / "design.md"
MOST_MECHANISMS = 32
"""As many as there are: one more needs one less, or a good reason."""

_FILE = re.compile(r"(?:[\w.]+/)*\w+\.py")
_ROOM = re.compile(r"^\| `([\w/]+)/` \|.*\| `(\w+\.py)` \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_NAME = re.compile(r"`([A-Z]\w*\.\w+|\w+\(\))`")
_THREAD = re.compile(
    r'(?:name=|name_prefix=|name: str = |SpanSink\(.+\), )"(kvferry-[a-z-]+)"'
)


@functools.cache
def modules() -> tuple[str, ...]:
    """Every module of the product as `plan/planner.py`."""
    paths = (
        path.relative_to(ROOT / root / "kvferry")
        for root in PACKAGES
        for path in (ROOT / root / "kvferry" / root).rglob("*.py")
    )
    return tuple(sorted(path.as_posix() for path in paths))


def source(module: str) -> str:
    return (ROOT / module.partition("/")[0] / "kvferry" / module).read_text(
        encoding="utf-8"
    )


def unknown_files(text: str) -> list[str]:
    """Names that are neither the end of a module's path nor a file of the repository or of its tests."""
    product = tuple(f"/{module}" for module in modules())
    return [
        name
        for name in _FILE.findall(text)
        if not any(module.endswith(f"/{name}") for module in product)
        and not (ROOT / name).is_file()
        and not (ROOT / "tests" / name).is_file()
    ]


@functools.cache
def defined() -> frozenset[str]:
    """Every `function()` and `Class.member` of the product; fields count as members."""
    return frozenset(
        name for module in modules() for name in _names(ast.parse(source(module)))
    )


def _names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield f"{node.name}()"
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{member.name}"
                elif isinstance(member, ast.AnnAssign) and isinstance(
                    member.target, ast.Name
                ):
                    yield f"{node.name}.{member.target.id}"
                elif isinstance(member, ast.Assign) and isinstance(
                    member.targets[0], ast.Name
                ):
                    yield f"{node.name}.{member.targets[0].id}"


@pytest.mark.parametrize("page", [ARCHITECTURE, DESIGN], ids=lambda page: page.name)
def test_every_file_and_function_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(_FILE.findall(text)) > 10
    assert unknown_files(text) == []
    assert [name for name in _NAME.findall(text) if name not in defined()] == []


def test_the_table_of_folders_has_every_folder_of_the_product_and_no_other() -> None:
    rooms = _ROOM.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    assert sorted(room for room, _ in rooms) == sorted(
        {module.rpartition("/")[0] for module in modules()}
    )
    assert [room for room, start in rooms if f"{room}/{start}" not in modules()] == []


def test_each_mechanism_has_a_number_a_reason_and_a_place() -> None:
    _, _, section = ARCHITECTURE.read_text(encoding="utf-8").partition(
        "## Mechanisms\n"
    )
    lines = section.partition("\n## ")[0].splitlines()
    rows = [
        line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ \|", line)
    ]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) <= MOST_MECHANISMS
    for _, name, reason, places in rows:
        assert len(reason) > 20, name
        assert _FILE.search(places), name


def test_every_thread_that_the_product_starts_is_in_the_table_of_threads() -> None:
    started = {name for module in modules() for name in _THREAD.findall(source(module))}
    rows = re.compile(r"^\| [^|]+ \| `(kvferry-[a-z-]+)` \|", re.MULTILINE)
    listed = set(rows.findall(ARCHITECTURE.read_text(encoding="utf-8")))
    assert {"kvferry-transfer", "kvferry-trace", "kvferry-spans"} <= started
    assert started == listed


def test_every_model_kind_names_a_test_and_its_date() -> None:
    _, _, section = (
        (ROOT / "docs/compatibility.md").read_text().partition("## Model kinds\n")
    )
    rows = [
        line.split(" | ")
        for line in section.partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ][2:]
    assert len(rows) > 10
    for kind, _, test, date in rows:
        assert _TEST.fullmatch(test), kind
        assert re.match(r"(20\d\d-\d\d-\d\d|not yet on an engine) \|$", date), kind
