"""Generated parts of the documentation agree with the code; what is written by hand beside them is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.generate_docs import DOCS, pages

ROOT = DOCS.parent
_VARIABLE = re.compile(r"\bKVFERRY_[A-Z0-9_]+\b")
_ENGINE_CODE = (
    "protocol",
    "plan",
    "trace",
    "link",
    "scheduler",
    "worker",
    "connector",
    "cli",
)
_ALL_CODE = (*_ENGINE_CODE, "bench", "scripts", "tests", "deploy", "Dockerfile")


@pytest.fixture(scope="module")
def wanted() -> dict[Path, str]:
    return pages()


def test_what_is_generated_is_up_to_date(wanted: dict[Path, str]) -> None:
    stale = [page.name for page, text in wanted.items() if page.read_text() != text]
    assert stale == [], "run `python -m scripts.generate_docs`"


def test_every_metric_has_advice(wanted: dict[Path, str]) -> None:
    rows = re.findall(
        r"^\| `vllm:(\w+).*?` \| \w+ \| .* \| (.*) \|$",
        wanted[DOCS / "operations.md"],
        re.MULTILINE,
    )
    assert len(rows) > 60
    assert [name for name, advice in rows if len(advice) < 10] == [], (
        "write in docs/operations.md what to do about it"
    )


def variables_of(*places: str) -> set[str]:
    """The variables of kvferry that code reads."""
    files = [
        path
        for place in places
        for path in (ROOT / place, *(ROOT / place).rglob("*"))
        if path.is_file()
    ]
    code = [
        path
        for path in files
        if path.suffix not in (".pyc", ".json", ".md", ".lock")
        and path != Path(__file__)
    ]
    return {
        name
        for path in code
        for name in _VARIABLE.findall(path.read_text(errors="replace"))
    }


def test_every_variable_that_the_code_reads_is_documented_and_no_other() -> None:
    text = (DOCS / "configuration.md").read_text()
    rows = set(re.findall(r"^\| `(KVFERRY_\w+)` \|", text, re.MULTILINE))
    assert {"KVFERRY_SECRET_FILE", "KVFERRY_SEED", "KVFERRY_DEVICE"} <= rows
    assert variables_of(*_ALL_CODE) == rows
    of_engines = text.partition("\n## Environment variables of engines")[2].partition(
        "\n## "
    )[0]
    assert [
        name
        for name in variables_of(*_ENGINE_CODE)
        if f"\n| `{name}` |" not in of_engines
    ] == []


def test_every_field_of_the_reference_says_what_it_means(
    wanted: dict[Path, str],
) -> None:
    _, _, messages = wanted[DOCS / "protocol-reference.md"].partition(
        "<!-- generated: params -->"
    )
    rows = [row.split(" | ") for row in messages.splitlines() if row.startswith("| `")]
    assert len(rows) > 80
    assert [row[0] for row in rows if not row[3].strip(" |")] == []
