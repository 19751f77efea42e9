"""`kvferry trace`: reads the recordings of engines, prints the slowest handovers and writes a trace for Perfetto."""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
from pathlib import Path

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.cli.trace.report import as_json, print_listing
from kvferry.protocol.visible import visible
from kvferry.trace.perfetto import perfetto_trace
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import Summary, summarize

HANDOVERS_OF_A_TRACE = 10_000
"""Most handovers (the slowest) in a trace for Perfetto: a viewer in a browser cannot open more."""


def run_trace(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        InvalidTrace: a file is no recording.
        InvalidArgument: an option is invalid.
    """
    # With millions of live events a collection takes longer than reading them.
    gc.disable()
    try:
        _run(options, whole_option("--slowest", options.slowest, 1, 10_000))
    finally:
        gc.enable()
    return 0


def _run(options: argparse.Namespace, slowest: int) -> None:
    # Before anything is read, which may take a minute.
    if options.out is not None and not options.out.endswith((".json", ".json.gz")):
        raise InvalidArgument(
            "-o", options.out, "a file .json or .json.gz, for ui.perfetto.dev"
        )
    summary = summarize(read_recording(options.dirs), options.request or "")
    if options.request is not None and not summary.handovers:
        raise InvalidArgument(
            "--request", options.request, "a part of an id that is in these files"
        )
    if options.out is not None:
        _write(options.out, summary)
    # What goes to standard output for another program stays alone there.
    log = sys.stderr if options.json else sys.stdout
    if options.json:
        json.dump(as_json(summary, slowest), sys.stdout, indent=2)
        print()
    else:
        print_listing(summary, slowest)
    if options.out is not None:
        num_all = len(summary.handovers)
        which = ""
        if num_all > HANDOVERS_OF_A_TRACE:
            which = f" (the {HANDOVERS_OF_A_TRACE} slowest of {num_all} handovers)"
        print(f"\nwritten for ui.perfetto.dev: {visible(options.out)}{which}", file=log)


def _write(out: str, summary: Summary) -> None:
    """Write the trace, compressed if its name says so.

    Raises:
        InvalidArgument: it cannot be written.
    """
    pieces = perfetto_trace(summary.handovers[:HANDOVERS_OF_A_TRACE])
    try:
        with Path(out).open("wb") as file:
            if out.endswith(".gz"):
                with gzip.open(file, "wb") as compressed:
                    compressed.writelines(pieces)
            else:
                file.writelines(pieces)
    except (OSError, ValueError) as refused:
        raise InvalidArgument(
            "-o", out, f"a file that can be written ({refused})"
        ) from None
