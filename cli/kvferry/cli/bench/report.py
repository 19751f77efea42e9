"""The output of `kvferry bench --connect`: a table, or JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvferry.cli.formatting import binary_bytes, print_line, print_table
from kvferry.cli.transfer.child import Outcome

SCHEMA = 1
_COLUMNS = ("memory", ">size", ">descriptors", ">reads", ">GB/s", ">p50 µs", ">p99 µs", "bytes")
_KINDS = {"DRAM": "host", "VRAM": "GPU"}


def as_json(outcome: Outcome) -> dict[str, object]:
    """The whole answer as plain values."""
    measured = outcome.measured
    return {
        "kvferry_bench": SCHEMA,
        "right": not measured.wrong,
        "listener": outcome.host,
        "transports": outcome.lanes,
        "first_contact_ms": measured.first_contact_ms,
        "reads": [{**msgspec.to_builtins(reads), "gb_s": reads.gb_s} for reads in measured.reads],
    }


def print_outcome(outcome: Outcome) -> None:
    """Print a table, and what applies to all of it."""
    print_table(_COLUMNS, _rows(outcome))
    print()
    for line in _lines(outcome):
        print_line(line)


def _rows(outcome: Outcome) -> Iterator[list[str]]:
    for reads in outcome.measured.reads:
        yield [
            _KINDS[reads.kind],
            binary_bytes(reads.num_bytes),
            f"{reads.descriptors}",
            f"{reads.reads}",
            f"{reads.gb_s:.3g}",
            _us(reads.p50_us),
            _us(reads.p99_us),
            "right" if not reads.wrong else f"{reads.wrong} of {reads.checked} WRONG, the first at {reads.first_wrong}",
        ]


def _us(time_us: float) -> str:
    return f"{time_us:.0f}" if time_us >= 100 else f"{time_us:.1f}"


def _lines(outcome: Outcome) -> Iterator[str]:
    measured = outcome.measured
    yield f"listener {outcome.host}, over {outcome.lanes or 'transports that UCX does not name'}"
    yield f"first contact {measured.first_contact_ms:.1f} ms"
    checked = sum(reads.checked for reads in measured.reads)
    if measured.wrong:
        yield f"{measured.wrong} of {checked} bytes are WRONG: do not run engines over this"
    else:
        yield f"every byte of {binary_bytes(checked)} is right"
