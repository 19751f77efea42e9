"""Fills what is generated in docs/: tables from the code, what the planner says to pairs, and the output of commands.

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
from dataclasses import fields
from pathlib import Path

from scripts import compatibility

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "operations.md"
COMMANDS_PAGE = DOCS / "cli.md"
PICTURE = DOCS / "plan.svg"
PICTURED = ("layers=32,heads=8,dim=128,tp=4,pp=2,layout=NHD", "layers=32,heads=8,dim=128,tp=2,stages=20+12,block=64")
COMPATIBILITY_PAGE = DOCS / "compatibility.md"

_CONSOLE = re.compile(r"(<!-- console -->\n```console\n\$ kvferry )([^\n]*)\n.*?(```\n)", re.DOTALL)


def tables() -> dict[str, str]:
    """Every generated part of the operations page by name, as Markdown."""
    from kvferry.connector.config import WITHOUT_MEANING, FerryConfig

    options = ["| key | default | meaning | |", "| --- | --- | --- | --- |"]
    for option in fields(FerryConfig):
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        shown = "none" if default is None else f"`{default}`".replace("'", '"')
        whose = "as in NixlConnector" if option.metadata["peer"] else ""
        options.append(f"| `{option.name}` | {shown} | {option.metadata['doc']} | {whose} |")
    ignored = [f"- `{key}`: {why}" for key, why in WITHOUT_MEANING.items()]
    return {"config": "\n".join(options), "ignored": "\n".join(ignored), "metrics": _metrics()}


def _metrics() -> str:
    from kvferry.connector.metrics import COUNTERS, HISTOGRAMS

    rows = ["| metric | kind | meaning |", "| --- | --- | --- |"]
    for counter in COUNTERS.values():
        label = f"{{{counter.label}}}" if counter.label else ""
        values = f" {counter.label}: {', '.join(counter.values)}." if counter.values else ""
        rows.append(f"| `vllm:{counter.exported}_total{label}` | counter | {counter.doc}{values} |")
    rows += [f"| `vllm:{histogram.exported}` | histogram | {histogram.doc} |" for histogram in HISTOGRAMS.values()]
    return "\n".join(rows)


def command_tables() -> dict[str, str]:
    """Every generated table of the commands' page by name, as Markdown."""
    from kvferry.cli.short_form import KEYS, defaults

    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, key in KEYS.items():
        default = f"`{defaults()[name]}`" if name in defaults() else ""
        rows.append(f"| `{name}` | {key.form} | {default} | {key.meaning} |")
    return {"keys": "\n".join(rows)}


def filled(text: str, parts: Callable[[], dict[str, str]] = tables) -> str:
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
    """What a `kvferry` command prints, without blanks at the ends of lines."""
    from kvferry.cli.main import main as kvferry

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        kvferry(shlex.split(arguments))
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def pages() -> dict[Path, str]:
    """Every file with something generated, as it should be."""
    return {
        PAGE: filled(PAGE.read_text()),
        COMMANDS_PAGE: with_output(filled(COMMANDS_PAGE.read_text(), command_tables)),
        COMPATIBILITY_PAGE: filled(COMPATIBILITY_PAGE.read_text(), lambda: {"pairs": compatibility.table()}),
        PICTURE: picture(*PICTURED),
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
