"""`kvferry trace`: reads the recordings of engines and writes one timeline per handover."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from pathlib import Path

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.cli.trace.page import page
from kvferry.cli.trace.report import Report, as_json, print_listing, report
from kvferry.cli.trace.waterfall import draw
from kvferry.protocol.visible import visible
from kvferry.trace.chrome import chrome_trace
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import merge

PAGE, PICTURE, TRACE = "waterfall.html", "waterfall.svg", "trace.json"
SUFFIXES = (".html", ".svg", ".json")
ROWS_OF_A_PAGE = 200
HANDOVERS_OF_A_TRACE = 10_000
"""Most handovers (the slowest) in a Chrome trace; viewers in a browser cannot open more."""


def run_trace(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Raises `InvalidTrace` and `InvalidArgument`."""
    gc.disable()  # with millions of live events a collection takes longer than reading them
    try:
        _run(options, whole_option("--slowest", options.slowest, 1, 10_000))
    finally:
        gc.enable()
    return 0


def _run(options: argparse.Namespace, slowest: int) -> None:
    if options.out is not None:
        _check_suffix(options.out)
    recording = read_recording(options.dirs)
    reported = report(recording, merge(recording), options.request)
    del recording
    if options.request is not None and not reported.timelines:
        raise InvalidArgument(
            "--request", options.request, "a part of an id that is in these files"
        )
    if options.out is not None:
        _write(Path(options.out), reported, slowest)
    if options.json:
        json.dump(as_json(reported, slowest), sys.stdout, indent=2)
        print()
        return
    print_listing(reported, slowest)
    if options.out is not None:
        of = len(reported.timelines)
        cut = f" (the {HANDOVERS_OF_A_TRACE} slowest of {of} handovers are in the trace)"
        print(f"\nwritten: {visible(options.out)}{cut if of > HANDOVERS_OF_A_TRACE else ''}")


def _check_suffix(out: str) -> None:
    """Refuse `-o x.pdf`, before anything is read: a folder of that name is not what was meant."""
    suffix, is_folder = Path(out).suffix.lower(), out.endswith("/") or Path(out).is_dir()
    if not out or (
        not is_folder and re.fullmatch(r"\.[a-z]{2,5}", suffix) and suffix not in SUFFIXES
    ):
        raise InvalidArgument(
            "-o", out, f"a file {', '.join(SUFFIXES)}, or a folder (with / at its end)"
        )


def _write(out: Path, reported: Report, slowest: int) -> None:
    """Write a folder with all three files, or one file by its suffix."""
    shown, of_all = reported.timelines[:slowest], len(reported.timelines)
    content = {
        TRACE: lambda: chrome_trace(reported.timelines[:HANDOVERS_OF_A_TRACE]),
        PAGE: lambda: page(reported, max(slowest, ROWS_OF_A_PAGE)),
        PICTURE: lambda: iter((draw(shown, of_all, reported.notes),)),
    }
    of_suffix = [
        name for name in content if Path(name).suffix == out.suffix.lower() and not out.is_dir()
    ]
    try:
        if not of_suffix:
            out.mkdir(parents=True, exist_ok=True)
        for name in of_suffix or content:
            path = out if of_suffix else out / name
            with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.writelines(content[name]())
    except (OSError, ValueError) as refused:
        raise InvalidArgument(
            "-o", str(out), f"a folder, or a file .json, .html or .svg ({refused})"
        ) from None
