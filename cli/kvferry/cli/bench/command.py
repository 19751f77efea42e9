"""`kvferry bench`: options, progress, exit status, and the results as a table or JSON."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterator
from typing import get_args

import msgspec

from kvferry.cli.arguments import InvalidArgument, number_option, read_address
from kvferry.cli.bench.client import ListenerSession, run_client
from kvferry.cli.bench.listener import BenchListener
from kvferry.cli.formatting import binary_bytes, print_line, print_table
from kvferry.cli.transfer.child import Outcome, check_installed
from kvferry.cli.transfer.messages import (
    MAX_BYTES,
    MIN_BYTES,
    CaseProgress,
    Device,
    Task,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import secrets_from_environment
from kvferry.protocol.errors import MISSING, one_of
from kvferry.protocol.visible import visible, visible_json

SCHEMA = 1
_COLUMNS = (
    "memory",
    ">size",
    ">descriptors",
    ">reads",
    ">GB/s",
    ">p50 µs",
    ">p99 µs",
    "bytes",
)
_KINDS = {"DRAM": "host", "VRAM": "GPU"}
PORT = 5700
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def run_bench(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        KvferryError: an option is invalid, or the reads could not be made.
    """
    if options.listen is None and options.connect is None:
        raise InvalidArgument("--listen", MISSING, "--listen, or --connect HOST[:PORT]")
    if options.listen is not None and options.connect is not None:
        expected = (
            "no --connect beside --listen: one machine listens, the other connects"
        )
        raise InvalidArgument("--connect", options.connect, expected)
    task = Task(
        device=_device(options.device),
        max_bytes=_size("--max-size", options.max_size),
        seconds=number_option("--seconds", options.seconds, 0.01, 600),
        timeout_s=number_option("--timeout", options.timeout, 0.1, 600),
    )
    # Before a port is opened or a peer is disturbed.
    check_installed()
    if options.listen is not None:
        return _listen(options, task)
    return _connect(options, task)


def _listen(options: argparse.Namespace, task: Task) -> int:
    host, port = read_address("--listen", options.listen, PORT)
    listener = BenchListener(
        host,
        port,
        task,
        secrets_from_environment(),
        report=lambda line: print(visible(line), file=sys.stderr, flush=True),
        allowed=_allowed_hosts(options.allowed_hosts),
    )
    # An exception of a handler would be lost in ZMQ's callbacks, so they only set a flag.
    handlers_before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers_before[number] = signal.signal(number, lambda *_: listener.stop())
    try:
        return listener.serve()
    finally:
        listener.close()
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _allowed_hosts(listed: str | None) -> AllowedHosts | None:
    if listed is None:
        return None
    try:
        return AllowedHosts.from_entries(listed.split(","))
    except ValueError as entry:
        expected = (
            "addresses, networks in CIDR notation, or *, with commas between them"
        )
        raise InvalidArgument("--allowed-hosts", str(entry), expected) from None


def _connect(options: argparse.Namespace, task: Task) -> int:
    host, port = read_address("--connect", options.connect, PORT)
    session = ListenerSession(host, port, task.timeout_s, secrets_from_environment())
    try:
        outcome = run_client(session, task, _show)
    finally:
        _clear_line()
    if options.json:
        print(visible_json(json.dumps(as_json(outcome), indent=2, ensure_ascii=False)))
    else:
        print_outcome(outcome)
    return 1 if outcome.measured.wrong else 0


def _show(progress: CaseProgress) -> None:
    """A live line, if standard error is a terminal."""
    if sys.stderr.isatty():
        _clear_line()
        print(progress.what, end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _device(text: str) -> Device:
    for device in get_args(Device):
        if text == device:
            return device  # type: ignore[no-any-return]
    raise InvalidArgument("--device", text, one_of(text, get_args(Device)))


def _size(name: str, text: str) -> int:
    """Bytes, with K, M or G (or KiB, MiB, GiB) for powers of 1024."""
    size = 0
    match = re.fullmatch(r"(?P<number>[0-9]{1,12}) ?(?P<unit>[KMG]?)(?:i?B)?", text)
    if match is not None:
        size = int(match["number"]) * _UNITS[match["unit"]]
    if not MIN_BYTES <= size <= MAX_BYTES or size % MIN_BYTES:
        raise InvalidArgument(name, text, "a multiple of 4K from 4K to 1G, as 64M")
    return size


def as_json(outcome: Outcome) -> dict[str, object]:
    """The whole answer as plain values."""
    measured = outcome.measured
    return {
        "kvferry_bench": SCHEMA,
        "right": not measured.wrong,
        "listener": outcome.host,
        "transports": outcome.lanes,
        "first_contact_ms": measured.first_contact_ms,
        "reads": [
            {**msgspec.to_builtins(reads), "gb_s": reads.gb_s}
            for reads in measured.reads
        ],
    }


def print_outcome(outcome: Outcome) -> None:
    """Print a table, and what applies to all of it."""
    print_table(_COLUMNS, _rows(outcome))
    print()
    for line in _lines(outcome):
        print_line(line)


def _rows(outcome: Outcome) -> Iterator[list[str]]:
    for reads in outcome.measured.reads:
        verdict = "right"
        if reads.wrong:
            verdict = f"{reads.wrong} of {reads.checked} WRONG, the first at {reads.first_wrong}"
        yield [
            _KINDS[reads.kind],
            binary_bytes(reads.num_bytes),
            f"{reads.descriptors}",
            f"{reads.reads}",
            f"{reads.gb_s:.3g}",
            _us(reads.p50_us),
            _us(reads.p99_us),
            verdict,
        ]


def _us(time_us: float) -> str:
    if time_us >= 100:
        return f"{time_us:.0f}"
    return f"{time_us:.1f}"


def _lines(outcome: Outcome) -> Iterator[str]:
    measured = outcome.measured
    yield f"listener {outcome.host}, over {outcome.lanes or 'transports that UCX does not name'}"
    yield f"first contact {measured.first_contact_ms:.1f} ms"
    checked = sum(reads.checked for reads in measured.reads)
    if measured.wrong:
        yield f"{measured.wrong} of {checked} bytes are WRONG: do not run engines over this"
    else:
        yield f"every byte of {binary_bytes(checked)} is right"
