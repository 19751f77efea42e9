"""`kvferry bench`: options, progress, exit status, and the results as a table or JSON."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from contextlib import closing
from typing import get_args

import msgspec

from kvferry.cli.arguments import InvalidArgument, number_option, read_address
from kvferry.cli.bench.side_channel import BenchClient, BenchListener
from kvferry.cli.formatting import binary_bytes, print_line, print_table, show_live
from kvferry.cli.transfer.child import Child, check_installed
from kvferry.cli.transfer.messages import (
    MAX_BYTES,
    MIN_BYTES,
    CaseResult,
    Device,
    Measured,
    Task,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import Secrets, secrets_from_environment
from kvferry.protocol.errors import MISSING, one_of
from kvferry.protocol.visible import visible, visible_json

SCHEMA = 1
PORT = 5700
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
    devices = get_args(Device)
    if options.device not in devices:
        expected = one_of(options.device, devices)
        raise InvalidArgument("--device", options.device, expected)
    task = Task(
        device=options.device,
        max_bytes=_size(options.max_size),
        seconds=number_option("--seconds", options.seconds, 0.01, 600),
        timeout_s=number_option("--timeout", options.timeout, 0.1, 600),
    )
    # Before a port is opened or a peer is disturbed.
    check_installed()
    if options.listen is not None:
        return _listen(options, task)
    return _connect(options, task)


def _size(text: str) -> int:
    """Bytes, with K, M or G (or KiB, MiB, GiB) for powers of 1024."""
    size = 0
    match = re.fullmatch(r"(?P<number>[0-9]{1,12}) ?(?P<unit>[KMG]?)(?:i?B)?", text)
    if match is not None:
        size = int(match["number"]) * _UNITS[match["unit"]]
    if not MIN_BYTES <= size <= MAX_BYTES or size % MIN_BYTES:
        expected = "a multiple of 4K from 4K to 1G, as 64M"
        raise InvalidArgument("--max-size", text, expected)
    return size


def _listen(options: argparse.Namespace, task: Task) -> int:
    host, port = read_address("--listen", options.listen, PORT)
    secrets = secrets_from_environment()
    allowed = _allowed_hosts(options.allowed_hosts, secrets)

    def report(line: str) -> None:
        print(visible(line), file=sys.stderr, flush=True)

    with closing(Child()) as owner:
        owner.send(task)
        listener = BenchListener(host, port, owner, secrets, allowed, report)
        with closing(listener):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: listener.stop())
            return listener.serve()


def _allowed_hosts(listed: str | None, secrets: Secrets) -> AllowedHosts:
    if listed is None:
        return AllowedHosts.without_list(secrets)
    try:
        return AllowedHosts.from_entries(listed.split(","))
    except ValueError as entry:
        expected = (
            "addresses, networks in CIDR notation, or *, with commas between them"
        )
        raise InvalidArgument("--allowed-hosts", str(entry), expected) from None


def _connect(options: argparse.Namespace, task: Task) -> int:
    host, port = read_address("--connect", options.connect, PORT)
    client = BenchClient(host, port, task.timeout_s, secrets_from_environment())
    try:
        measured = client.run(task, show_live)
    finally:
        show_live("")
    if options.json:
        print(visible_json(json.dumps(as_json(measured), indent=2, ensure_ascii=False)))
    else:
        print_measured(measured)
    return 1 if measured.wrong else 0


def as_json(measured: Measured) -> dict[str, object]:
    """The whole answer as plain values."""
    plain = msgspec.to_builtins(measured)
    del plain["type"]
    return {"kvferry_bench": SCHEMA, "right": not measured.wrong, **plain}


def print_measured(measured: Measured) -> None:
    """Print a table, and what applies to all of it."""
    print_table(_COLUMNS, map(_row, measured.reads))
    transports = measured.transports or "transports that UCX does not name"
    checked = sum(reads.checked for reads in measured.reads)
    verdict = f"every byte of {binary_bytes(checked)} is right"
    if measured.wrong:
        verdict = f"{measured.wrong} of {checked} bytes are WRONG: do not run engines over this"
    print()
    print_line(f"listener {measured.listener}, over {transports}")
    print_line(f"first contact {measured.first_contact_ms:.1f} ms")
    print_line(verdict)


def _row(reads: CaseResult) -> list[str]:
    verdict = "right"
    if reads.wrong:
        verdict = (
            f"{reads.wrong} of {reads.checked} WRONG, the first at {reads.first_wrong}"
        )
    return [
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
