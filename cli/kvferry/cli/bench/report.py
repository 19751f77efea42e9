"""The output of `kvferry bench --connect`: a table, plain lines if rich is missing, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

import msgspec

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.bench.client import Outcome
from kvferry.cli.bench.messages import Reads
from kvferry.cli.formatting import binary_bytes, counted

SCHEMA = 1
_COLUMNS = ("memory", ">size", ">descriptors", ">reads", ">GB/s", ">p50 µs", ">p99 µs", "bytes")
_KINDS = {"DRAM": "host", "VRAM": "GPU"}


def gb_s(reads: Reads) -> float:
    """GB/s of the median read."""
    return reads.num_bytes / reads.p50_us / 1e3


def as_json(outcome: Outcome) -> dict[str, object]:
    """The whole answer as plain values."""
    return {
        "kvferry_bench": SCHEMA,
        "right": not outcome.wrong,
        "listener": outcome.host,
        "transports": outcome.lanes,
        "no_cuda": outcome.no_cuda,
        "first_contact_ms": outcome.first_contact_ms,
        "reads": [{**_plain(reads), "gb_s": gb_s(reads)} for reads in outcome.reads],
        "notifications": _plain(outcome.echoes) if outcome.echoes is not None else None,
    }


def _plain(message: msgspec.Struct) -> dict[str, object]:
    values: dict[str, object] = msgspec.to_builtins(message)
    values.pop("type")
    return values


def print_outcome(stream: TextIO, outcome: Outcome) -> None:
    """Print a table if rich is installed, else plain lines."""
    rows = list(_rows(outcome))
    try:
        from kvferry.cli.formatting import console, new_table

        table = new_table(_COLUMNS)
        for row in rows:
            table.add_row(*row)
        console(stream).print(table)
    except (InvalidArgument, ImportError):
        for row in ([column.removeprefix(">") for column in _COLUMNS], *rows):
            print("  ".join(row), file=stream)
    for line in _lines(outcome):
        print(line, file=stream)


def _rows(outcome: Outcome) -> Iterator[list[str]]:
    for reads in outcome.reads:
        yield [
            _KINDS[reads.kind],
            binary_bytes(reads.num_bytes),
            f"{reads.descriptors}",
            f"{reads.reads}",
            f"{gb_s(reads):.3g}",
            f"{reads.p50_us:.0f}" if reads.p50_us >= 100 else f"{reads.p50_us:.1f}",
            f"{reads.p99_us:.0f}" if reads.p99_us >= 100 else f"{reads.p99_us:.1f}",
            "right" if not reads.wrong else f"{reads.wrong} of {reads.checked} WRONG, the first at {reads.first_wrong}",
        ]


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"\nlistener {outcome.host}, over {outcome.lanes or 'transports that UCX does not name'}"
    yield f"first contact {outcome.first_contact_ms:.1f} ms"
    if outcome.echoes is not None:
        echoes = outcome.echoes
        there_and_back = f"p50 {echoes.p50_us:.0f} µs, p99 {echoes.p99_us:.0f} µs"
        yield f"a notification there and back: {there_and_back} ({counted(echoes.reads, 'round trip')})"
    for side, why in outcome.no_cuda.items():
        yield f"no GPU memory {'here' if side == 'here' else 'at the listener'}: {why}"
    checked = sum(reads.checked for reads in outcome.reads)
    if outcome.wrong:
        yield f"{outcome.wrong} of {checked} bytes are WRONG: do not run engines over this"
    else:
        yield f"every byte of {binary_bytes(checked)} is right"
