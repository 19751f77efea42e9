"""Generated parts of the documentation agree with the code; what is written by hand beside them is complete."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.protocol import description_json, geometry, handshake, notifications, params
from scripts import protocol_reference
from scripts.generate_docs import DOCS, PICTURED, filled, main, pages

ROOT = DOCS.parent
_VARIABLE = re.compile(r"\bKVFERRY_[A-Z0-9_]+\b")
_ENGINE_CODE = ("protocol", "plan", "trace", "scheduler", "worker", "connector", "cli")
_ALL_CODE = (*_ENGINE_CODE, "bench", "scripts", "tests", "deploy", "Dockerfile")


@pytest.fixture(scope="module")
def wanted() -> dict[Path, str]:
    return pages()


def test_what_is_generated_is_up_to_date(wanted: dict[Path, str]) -> None:
    stale = [page.name for page, text in wanted.items() if page.read_text() != text]
    assert stale == [], "run `python -m scripts.generate_docs`"


def test_a_page_that_is_out_of_date_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "cli.md"
    for text, code in ((page.read_text(), 0), (page.read_text() + "more", 1)):
        monkeypatch.setattr("scripts.generate_docs.pages", lambda text=text: {page: text})
        assert main(["--check"]) == code
    assert f"{page} is out of date" in capsys.readouterr().err


def test_a_page_without_a_place_for_a_generated_part_is_noticed() -> None:
    with pytest.raises(SystemExit, match="config"):
        filled("no place", {"config": "table"})


def test_captions_of_the_picture_of_a_plan_say_what_is_in_it(wanted: dict[Path, str]) -> None:
    """Its title, and under the names of the two engines their blocks; on the commands' page its command too."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", wanted[DOCS / "plan.svg"])
    blocks = [text.rpartition(", ")[2] for text in texts if "blocks of" in text]
    caption = f"{' '.join(texts[0].split())}, {' → '.join(blocks)}"
    assert len(blocks) == 2
    assert f"(here {caption}):\n\n![who reads what from whom](docs/plan.svg)" in (ROOT / "README.md").read_text()
    page = (DOCS / "cli.md").read_text()
    assert f"![who reads what from whom](plan.svg)\n\n{caption}:\n" in page
    assert f"\nkvferry plan {' '.join(PICTURED)} --svg plan.svg\n" in page


def test_every_metric_has_advice(wanted: dict[Path, str]) -> None:
    rows = re.findall(r"^\| `vllm:(\w+).*?` \| \w+ \| .* \| (.*) \|$", wanted[DOCS / "operations.md"], re.MULTILINE)
    assert len(rows) > 60
    assert [name for name, advice in rows if len(advice) < 10] == [], "write in docs/operations.md what to do about it"


def variables_of(*places: str) -> set[str]:
    """The variables of kvferry that code reads."""
    files = [path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()]
    code = [path for path in files if path.suffix not in (".pyc", ".json", ".md", ".lock") and path != Path(__file__)]
    return {name for path in code for name in _VARIABLE.findall(path.read_text(errors="replace"))}


def test_every_variable_that_the_code_reads_is_documented_and_no_other() -> None:
    text = (DOCS / "configuration.md").read_text()
    rows = set(re.findall(r"^\| `(KVFERRY_\w+)` \|", text, re.MULTILINE))
    assert {"KVFERRY_SECRET_FILE", "KVFERRY_SEED", "KVFERRY_DEVICE"} <= rows
    assert variables_of(*_ALL_CODE) == rows
    of_engines = text.partition("\n## Environment variables of engines")[2].partition("\n## ")[0]
    assert [name for name in variables_of(*_ENGINE_CODE) if f"\n| `{name}` |" not in of_engines] == []


def structs(module: object) -> set[type[msgspec.Struct]]:
    found = {each for each in vars(module).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)}
    return {each for each in found if each.__struct_fields__ and each.__doc__ and not each.__name__.startswith("_")}


def test_the_reference_has_every_message_that_leaves_an_engine() -> None:
    reported = {message for part in protocol_reference.PARTS.values() for message in part}
    tags = {message.__struct_config__.tag for message in reported} - {None}
    modules = (geometry, handshake, notifications, params)
    # A struct with the tag of another reads a part of it.
    missing = {one for module in modules for one in structs(module) - reported if one.__struct_config__.tag not in tags}
    assert missing == set()


def test_every_field_of_the_reference_says_what_it_means(wanted: dict[Path, str]) -> None:
    _, _, messages = wanted[DOCS / "protocol-reference.md"].partition("<!-- generated: params -->")
    rows = [row.split(" | ") for row in messages.splitlines() if row.startswith("| `")]
    assert len(rows) > 80
    assert [row[0] for row in rows if not row[3].strip(" |")] == []


def test_bounds_in_the_reference_are_those_of_the_types() -> None:
    messages = "".join(protocol_reference.reference().values())
    assert "| `lease_slot` | integer, from 0 below 2²⁴ | required |" in messages
    assert "| `remote_port` | integer, from 1 to 65,535 | required |" in messages
    assert "| `digests` | list (1 to 65,536) of 32 hex digits | required |" in messages
    assert "| `mac_key` | bytes, 32 bytes | required |" in messages


def test_the_reference_says_what_a_description_json_leaves_out_and_adds() -> None:
    section = (DOCS / "protocol-reference.md").read_text().partition("## Description JSON")[2]
    for of_json, on_the_wire in (
        (description_json.EngineJson, handshake.EngineDescription),
        (description_json.WorkerJson, handshake.WorkerDescription),
    ):
        for field in set(of_json.__struct_fields__) ^ set(on_the_wire.__struct_fields__):
            assert f"`{field}`" in section
