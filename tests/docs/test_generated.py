"""Generated parts of the documentation agree with the code and are complete."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.protocol import description_json, geometry, handshake, notifications, params
from scripts import metric_table, protocol_reference
from scripts.environment_variables import OF_ENGINES, OF_SCRIPTS, read_by_code
from scripts.generate_docs import CLI_PAGE, DOCS, PICTURE, PICTURED, filled, main, pages
from scripts.metric_advice import ADVICE

README = DOCS.parent / "README.md"


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
        filled("no place", lambda: {"config": "table"})


def test_captions_of_the_picture_of_a_plan_say_what_is_in_it(wanted: dict[Path, str]) -> None:
    """Its title, and under the names of the two engines their blocks; on the commands' page its command too."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", wanted[PICTURE])
    blocks = [text.rpartition(", ")[2] for text in texts if "blocks of" in text]
    caption = f"{' '.join(texts[0].split())}, {' → '.join(blocks)}"
    assert len(blocks) == 2
    assert f"(here {caption}):\n\n![who reads what from whom](docs/plan.svg)" in README.read_text()
    page = CLI_PAGE.read_text()
    assert f"![who reads what from whom](plan.svg)\n\n{caption}:\n" in page
    assert f"\nkvferry plan {' '.join(PICTURED)} --svg plan.svg\n" in page


def test_every_metric_has_advice_and_no_advice_is_of_none() -> None:
    names = set(metric_table.exported())
    assert sorted(names - set(ADVICE)) == [], "say in scripts/metric_advice.py what to do about it"
    assert sorted(set(ADVICE) - names) == [], "no such metric"
    assert [name for name, advice in ADVICE.items() if len(advice) < 10] == []


def test_every_variable_that_the_code_reads_is_documented(wanted: dict[Path, str]) -> None:
    read = read_by_code()
    assert {"KVFERRY_SECRET_FILE", "KVFERRY_SEED", "KVFERRY_DEVICE"} <= set(read)
    reported = {each.name for each in (*OF_ENGINES, *OF_SCRIPTS) if each.name.startswith("KVFERRY_")}
    assert sorted(set(read) - reported) == [], "say in scripts/environment_variables.py what it is for"
    assert sorted(reported - set(read)) == [], "nothing reads it"
    page = wanted[DOCS / "configuration.md"]
    assert [name for name in read if f"\n| `{name}` |" not in page] == []


def test_what_an_engine_reads_stands_in_the_table_of_engines() -> None:
    code = ("protocol/", "plan/", "scheduler/", "worker/", "connector/", "cli/")
    of_engines = {name for name, files in read_by_code().items() if any(file.startswith(code) for file in files)}
    assert of_engines <= {each.name for each in OF_ENGINES}


def structs(module: object) -> set[type[msgspec.Struct]]:
    found = vars(module).values()
    return {each for each in found if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__doc__}


def test_the_reference_has_every_message_that_leaves_an_engine(wanted: dict[Path, str]) -> None:
    reported = {message for chapter in protocol_reference.CHAPTERS for message in chapter.messages}
    defined = {
        message
        for module in (description_json, geometry, handshake, notifications, params)
        for message in structs(module)
        if message.__struct_fields__ and not message.__name__.startswith("_")
    }
    partial = {
        message for message in defined if any(message is not each and looks_like(message, each) for each in reported)
    }
    assert {message.__name__ for message in defined - reported - partial} == set()
    page = wanted[DOCS / "protocol-reference.md"]
    for message in reported:
        assert re.search(rf"^### {message.__name__}\b", page, re.MULTILINE)


def looks_like(message: type[msgspec.Struct], other: type[msgspec.Struct]) -> bool:
    """Whether it reads a part of another message: the same tag."""
    tag = message.__struct_config__.tag
    return tag is not None and tag == other.__struct_config__.tag


def test_every_field_of_the_reference_says_what_it_means(wanted: dict[Path, str]) -> None:
    page = wanted[DOCS / "protocol-reference.md"]
    _, _, messages = page.partition("<!-- generated: messages -->")
    rows = [row.split(" | ") for row in messages.splitlines() if row.startswith("| `")]
    assert len(rows) > 80
    assert [row[0] for row in rows if not row[3].strip(" |")] == []


def test_bounds_in_the_reference_are_those_of_the_types() -> None:
    messages = protocol_reference.reference()["messages"]
    assert "| `lease_slot` | integer, from 0 below 2²⁴ | required |" in messages
    assert "| `remote_port` | integer, from 1 to 65,535 | required |" in messages
    assert "| `digests` | list (1 to 65,536) of 32 hex digits | required |" in messages
    assert "| `mac_key` | bytes, 32 bytes | required |" in messages
    assert "| `boot` | 32 hex digits or null | `null` |" in messages
