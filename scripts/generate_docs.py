"""Fill the generated parts of docs/: tables from the code, the planner's answers for pairs, and the output of commands.

python -m scripts.generate_docs            # write
python -m scripts.generate_docs --check    # exit 1 when something is out of date; the tests call this
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from unittest import mock

from kvferry.trace.reading import read_recording
from kvferry.trace.summary import summarize
from scripts import markdown, protocol_reference
from tests.faults.guards import GUARDS
from tests.promises import marked_tests
from tests.trace.example import write_example

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURED = (
    "layers=32,heads=8,dim=128,tp=4,pp=2,layout=NHD",
    "layers=32,heads=8,dim=128,tp=2,stages=20+12,block=64",
)
PICTURED_HANDOVERS = 12
_CONSOLE = re.compile(
    r"(<!-- console -->\n```console\n\$ kvferry )([^\n]*)\n.*?(```\n)", re.DOTALL
)
_ADVICE = re.compile(
    r"^\| (`vllm:[^|]*`) \| [^|]* \| [^|]* \| ([^|]*) \|$", re.MULTILINE
)


def pages() -> dict[Path, str]:
    """Every file with something generated, as it should be."""
    # Imported here: tests of the protocol read this module, also where matplotlib is not installed.
    from scripts import timelines_picture

    drawings = protocol_reference.drawings()
    parts: dict[str, Mapping[str, str]] = {
        "configuration.md": {"config": options(), "ignored": ignored()},
        "operations.md": {"metrics": metrics(part("operations.md", "metrics"))},
        "protocol-reference.md": protocol_reference.reference(),
        "protocol.md": {
            name: drawings[name] for name in parts_of("protocol.md", "exchange")
        },
        "streaming.md": {
            name: drawings[name] for name in parts_of("streaming.md", "exchange")
        },
        "prefix.md": {
            name: drawings[name] for name in parts_of("prefix.md", "exchange")
        },
        "cli.md": {"keys": short_form_keys(part("cli.md", "keys"))},
        "reliability.md": {"promises": promises()},
        "compatibility.md": {
            "pairs": pairs(part("compatibility.md", "pairs")),
            "next vllm": next_vllm(),
        },
        "relayout.md": relayout(),
        "timelines.md": {},
    }
    found: dict[Path, str] = {}
    with example():
        for name, tables in parts.items():
            found[DOCS / name] = with_output(filled((DOCS / name).read_text(), tables))
        found[DOCS / "plan.svg"] = drawn(f"plan {' '.join(PICTURED)} --svg", "plan.svg")
        slowest = summarize(read_recording(["traces"])).handovers[:PICTURED_HANDOVERS]
        found[DOCS / "timelines.svg"] = timelines_picture.picture(slowest)
    return found


def options() -> str:
    """The configuration keys with their defaults and meanings, from the class that reads them."""
    from kvferry.connector.config import FerryConfig

    rows = []
    for option in fields(FerryConfig):
        default = (
            list(option.default)
            if isinstance(option.default, tuple)
            else option.default
        )
        shown = "none" if default is None else f"`{default}`".replace("'", '"')
        whose = "as in NixlConnector" if option.metadata["peer"] else ""
        rows.append((f"`{option.name}`", shown, option.metadata["doc"], whose))
    return markdown.table("key | default | meaning |", rows)


def ignored() -> str:
    """The keys that are accepted and have no effect."""
    from kvferry.connector.config import WITHOUT_MEANING

    return "\n".join(f"- `{key}`: {why}" for key, why in WITHOUT_MEANING.items())


def metrics(page: str) -> str:
    """The table of metrics. Kind and meaning come from the definitions; the last column is written on the page by hand
    and kept. A new metric gets an empty cell, which a test reports."""
    from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS

    advice = dict(_ADVICE.findall(page))
    found: list[tuple[str, str, str]] = []
    for counter in COUNTERS.values():
        label = f"{{{counter.label}}}" if counter.label else ""
        values = (
            f" {counter.label}: {', '.join(counter.values)}." if counter.values else ""
        )
        found.append(
            (f"{counter.exported}_total{label}", "counter", f"{counter.doc}{values}")
        )
    found += [(gauge.exported, "gauge", gauge.doc) for gauge in GAUGES.values()]
    found += [
        (histogram.exported, "histogram", histogram.doc)
        for histogram in HISTOGRAMS.values()
    ]
    rows = [
        (f"`vllm:{name}`", kind, doc, advice.get(f"`vllm:{name}`", ""))
        for name, kind, doc in found
    ]
    return markdown.table("metric | kind | meaning | do", rows)


def promises() -> str:
    """The tests that are marked with the promises' numbers, by file, as the sentences that their names are; and the
    guards of each promise."""
    rows: list[tuple[object, str, str]] = []
    for number, files in marked_tests().items():
        for path, tests in files.items():
            sentences = [test.removeprefix("test_").replace("_", " ") for test in tests]
            rows.append((number, f"`{path}`", "; ".join(sentences)))
        guards = [f"`{guard.key}`" for guard in GUARDS if number in guard.promises]
        if guards:
            rows.append(
                (number, "its [guards](#guards-switched-off)", ", ".join(guards))
            )
    return markdown.table("promise | file | tests that fail without it", rows)


def short_form_keys(rows: str) -> str:
    """The keys of a short form; the meanings are written on the page.

    Raises:
        SystemExit: the page does not say what a key means.
    """
    from kvferry.cli.plan.short_form import KEYS, ShortForm

    meanings = dict(re.findall(r"^\| `(\w+)` \|.* \| (.+?) \|$", rows, re.MULTILINE))
    defaults = {option.name: option.default for option in fields(ShortForm)}
    keys = []
    for name, key in KEYS.items():
        if name not in meanings:
            raise SystemExit(f"write in docs/cli.md what the key {name} means")
        # A default that is empty is derived, or means that the engine has no such thing.
        default = f"`{defaults[name]}`" if defaults[name] else ""
        meaning = meanings[name].replace("\\|", "|")
        keys.append((f"`{name}`", key.form, default, meaning))
    return markdown.table("key | value | default | meaning", keys)


def pairs(rows: str) -> str:
    """The tables of models and pairs with the planner's answer in the last column of every pair.

    The rest is written on the page: a model's short form, as `kvferry plan` takes it, and what either side adds to it.
    """
    models: dict[str, str] = {}
    found = []
    for line in rows.splitlines():
        cells = [cell.strip("` ") for cell in line[2:-2].split(" | ")]
        if len(cells) == 2 and "=" in cells[1]:
            models[cells[0]] = cells[1]
        elif cells[1:2] and cells[1] in models:
            producer, consumer = (
                _joined(models[cells[1]], more) for more in cells[2:4]
            )
            line = f"{line.rpartition(' | ')[0]} | {_answer(producer, consumer)} |"
        found.append(line)
    return "\n".join(found)


def next_vllm() -> str:
    """The published run of the tests under vLLM's next release."""
    from tests.next_vllm.run import RESULT

    if not RESULT.exists():
        return "No whole run of one commit is published yet."
    found = json.loads(RESULT.read_text())
    rows = [
        (
            f"`{folder}`",
            *(counts.get(name, 0) for name in ("passed", "failed", "skipped")),
        )
        for folder, counts in found["folders"].items()
    ]
    head = (
        f"vLLM {found['vllm']} on {found['compiled']}, torch {found['torch']}, {found['date']} at commit "
        f"`{found['commit']}`, in {found['seconds']} s on {found['machine']['cores']} cores. Only tests failed that "
        "`tests/next_vllm/cannot_run.py` names.\n\n"
    )
    return head + markdown.table("tests | passed | failed | skipped", rows)


def relayout() -> Mapping[str, str]:
    """The tables of the compiled kernel, with the Triton of requirements/cpu.lock; with another one they stay."""
    locked = re.search(
        r"^triton==(\S+)",
        (DOCS.parent / "requirements" / "cpu.lock").read_text(),
        re.MULTILINE,
    )
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found = None
    if locked is None or found != locked[1]:
        return {}
    from tests.worker.relayout import compiled_tables as tables

    compiler = f"Triton {found}, as in the CPU environment:\n\n"
    return {
        "kernels": compiler + tables.resources(),
        "predictions": tables.predictions(),
        "gpus": tables.gpus(),
    }


def _joined(model: str, more: str) -> str:
    """A model's short form with keys added or replaced."""
    keys = dict(
        item.split("=", 1) for form in (model, more) if form for item in form.split(",")
    )
    return ",".join(f"{key}={value}" for key, value in keys.items())


def _answer(producer: str, consumer: str) -> str:
    """The planner's answer for two short forms."""
    from kvferry.cli.plan.sides import read_sides
    from kvferry.plan.planner import plan_engine
    from kvferry.plan.refusals import PlanRefused
    from kvferry.plan.wording import counted

    there, here = (side.engine for side in read_sides(producer, consumer, bytes))
    try:
        routes = [route for plan in plan_engine(here, there) for route in plan.routes]
    except PlanRefused as refused:
        first, *others = refused.reasons
        return f"**refused**: {first}{f' (and {len(others)} more)' if others else ''}"
    reads = [route for route in routes if route.slices]
    placings = sorted({item.placing.value for route in reads for item in route.slices})
    lengths = sorted({bundle.run_bytes for route in reads for bundle in route.bundles})
    runs = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}…{lengths[-1]}"
    releases = (
        f", {counted(len(routes) - len(reads), 'release')}"
        if len(routes) > len(reads)
        else ""
    )
    return f"**{' and '.join(placings)}**: {counted(len(reads), 'route')}{releases}, runs of {runs} B"


def parts_of(page: str, kind: str) -> list[str]:
    """The names of a page's generated parts that begin with `kind: `."""
    return re.findall(rf"<!-- generated: ({kind}: .*) -->", (DOCS / page).read_text())


def part(page: str, name: str) -> str:
    """A generated part of a page as it is now."""
    return _split((DOCS / page).read_text(), name)[1]


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with every part between its markers replaced.

    Raises:
        SystemExit: it has no such markers.
    """
    for name, table in tables.items():
        before, _, after = _split(text, name)
        text = f"{before}{table}\n{after}"
    return text


def _split(text: str, name: str) -> tuple[str, str, str]:
    """The page up to the first marker, the part between the markers, and the page from the last marker on."""
    before, begin, rest = text.partition(f"<!-- generated: {name} -->\n")
    between, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit(f"no place for the generated part {name!r}")
    return before + begin, between, end + after


def with_output(text: str) -> str:
    """The page with the output of every `kvferry` command that is marked for it."""
    return _CONSOLE.sub(
        lambda found: f"{found[1]}{found[2]}\n{output_of(found[2])}{found[3]}", text
    )


@contextlib.contextmanager
def example() -> Iterator[None]:
    """A working directory with the recordings that docs/timelines.md and its picture show, in `traces`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        write_example(Path(folder) / "traces")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def drawn(arguments: str, file: str) -> str:
    """The picture that a `kvferry` command writes."""
    output_of(f"{arguments} {file}")
    return Path(file).read_text()


def output_of(arguments: str) -> str:
    """Output of a `kvferry` command, without blanks at the ends of lines."""
    from kvferry.cli.main import main as kvferry

    printed = io.StringIO()
    width = mock.patch.dict(os.environ, {"COLUMNS": "80"})
    with (
        width,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        kvferry(shlex.split(arguments))
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate_docs",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 when something is out of date",
    )
    check = parser.parse_args().check
    stale = {
        page: wanted
        for page, wanted in pages().items()
        if not page.exists() or page.read_text() != wanted
    }
    for page, wanted in stale.items():
        if check:
            print(
                f"{page} is out of date: run `python -m scripts.generate_docs`",
                file=sys.stderr,
            )
        else:
            page.write_text(wanted)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
