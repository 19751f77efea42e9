"""Fill the generated parts of docs/: tables from the code, the planner's answers for pairs, and the output of commands.

python -m scripts.generate_docs            # write
python -m scripts.generate_docs --check    # exit 1 when something is out of date; the tests call this
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts import (
    compatibility,
    doc_commands,
    environment_variables,
    metric_table,
    option_tables,
    protocol_reference,
    timelines_page,
)
from tests.faults import guards

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIGURATION_PAGE = DOCS / "configuration.md"
OPERATIONS_PAGE = DOCS / "operations.md"
PROTOCOL_PAGE = DOCS / "protocol-reference.md"
CLI_PAGE = DOCS / "cli.md"
COMMANDS_PAGE = DOCS / "commands.md"
PICTURE = DOCS / "plan.svg"
PICTURED = ("layers=32,heads=8,dim=128,tp=4,pp=2,layout=NHD", "layers=32,heads=8,dim=128,tp=2,stages=20+12,block=64")
COMPATIBILITY_PAGE = DOCS / "compatibility.md"
RELIABILITY_PAGE = DOCS / "reliability.md"
TIMELINES_PAGE = DOCS / "timelines.md"
TIMELINES_PICTURE = DOCS / "timelines.svg"

_CONSOLE = re.compile(r"(<!-- console -->\n```console\n\$ kvferry )([^\n]*)\n.*?(```\n)", re.DOTALL)


def command_tables() -> dict[str, str]:
    """Every generated table of the commands' page by name, as Markdown."""
    from kvferry.cli.plan.short_form import KEYS, defaults

    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, key in KEYS.items():
        default = f"`{defaults()[name]}`" if name in defaults() else ""
        rows.append(f"| `{name}` | {key.form} | {default} | {key.meaning} |")
    return {"keys": "\n".join(rows)}


def configuration() -> dict[str, str]:
    """Every generated part of the configuration page by name, as Markdown."""
    return {
        "config": option_tables.options(),
        "ignored": option_tables.ignored(),
        "environment": environment_variables.table(environment_variables.OF_ENGINES),
        "script-environment": environment_variables.table(environment_variables.OF_SCRIPTS),
    }


def filled(text: str, parts: Callable[[], dict[str, str]]) -> str:
    """The page with every part between its markers replaced."""
    for name, table in parts().items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"no place for the generated part {name!r}")
        text = before + begin + table + "\n" + end + after
    return text


def with_output(text: str) -> str:
    """The page with the output of every `kvferry` command that is marked for it."""
    return _CONSOLE.sub(lambda found: f"{found[1]}{found[2]}\n{output_of(found[2])}{found[3]}", text)


def output_of(arguments: str) -> str:
    """Output of a `kvferry` command, without blanks at the ends of lines."""
    from kvferry.cli.main import main as kvferry

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        kvferry(shlex.split(arguments))
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def pages() -> dict[Path, str]:
    """Every file with something generated, as it should be."""
    written = {
        CONFIGURATION_PAGE: filled(CONFIGURATION_PAGE.read_text(), configuration),
        OPERATIONS_PAGE: filled(OPERATIONS_PAGE.read_text(), lambda: {"metrics": metric_table.table()}),
        PROTOCOL_PAGE: filled(PROTOCOL_PAGE.read_text(), protocol_reference.reference),
        CLI_PAGE: with_output(filled(CLI_PAGE.read_text(), command_tables)),
        COMPATIBILITY_PAGE: filled(COMPATIBILITY_PAGE.read_text(), lambda: {"pairs": compatibility.table()}),
        RELIABILITY_PAGE: filled(RELIABILITY_PAGE.read_text(), lambda: {"guards": guards.table()}),
        TIMELINES_PAGE: timelines_page.page(TIMELINES_PAGE.read_text(), with_output),
    }
    commands = doc_commands.of_repository({page: text for page, text in written.items() if page != COMMANDS_PAGE})
    return {
        **written,
        COMMANDS_PAGE: filled(COMMANDS_PAGE.read_text(), lambda: doc_commands.tables(commands)),
        PICTURE: picture(*PICTURED),
        TIMELINES_PICTURE: timelines_page.picture(output_of),
    }


def picture(producer: str, consumer: str) -> str:
    """The picture of a plan between two short forms."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.svg"
        output_of(f"plan {producer} {consumer} --svg {shlex.quote(str(path))}")
        return path.read_text()


def main(arguments: list[str]) -> int:
    """Write or check the pages."""
    stale = {page: wanted for page, wanted in pages().items() if not page.exists() or page.read_text() != wanted}
    for page, wanted in stale.items():
        if "--check" in arguments:
            print(f"{page} is out of date: run `python -m scripts.generate_docs`", file=sys.stderr)
        else:
            page.write_text(wanted)
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
