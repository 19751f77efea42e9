"""`kvferry trace`: reads the recordings of engines and writes one timeline per handover."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.cli.trace.page import page
from kvferry.cli.trace.report import Report, as_json, print_listing, report
from kvferry.cli.trace.waterfall import draw
from kvferry.protocol.visible import visible
from kvferry.trace.chrome import chrome_trace
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import merge

PAGE = "waterfall.html"
PICTURE = "waterfall.svg"
TRACE = "trace.json"
SUFFIXES = (".html", ".svg", ".json")
ROWS_OF_A_PAGE = 200
HANDOVERS_OF_A_TRACE = 10_000
"""Most handovers (the slowest) in a Chrome trace; viewers in a browser cannot open more."""


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
        note = ""
        num_all = len(reported.timelines)
        if num_all > HANDOVERS_OF_A_TRACE:
            note = f" (the {HANDOVERS_OF_A_TRACE} slowest of {num_all} handovers are in the trace)"
        print(f"\nwritten: {visible(options.out)}{note}")


def _check_suffix(out: str) -> None:
    """Refuse `-o x.pdf`, before anything is read: a folder of that name is not what was meant.

    Raises:
        InvalidArgument: names what is accepted.
    """
    suffix = Path(out).suffix.lower()
    is_folder = out.endswith("/") or Path(out).is_dir()
    looks_like_file = not is_folder and re.fullmatch(r"\.[a-z]{2,5}", suffix) is not None
    if not out or (looks_like_file and suffix not in SUFFIXES):
        raise InvalidArgument(
            "-o", out, f"a file {', '.join(SUFFIXES)}, or a folder (with / at its end)"
        )


def _write(out: Path, reported: Report, slowest: int) -> None:
    """Write a folder with all three files, or one file by its suffix.

    Raises:
        InvalidArgument: it cannot be written.
    """
    paths = {name: out / name for name in (TRACE, PAGE, PICTURE)}
    is_folder = True
    if not out.is_dir():
        for name in paths:
            if Path(name).suffix == out.suffix.lower():
                paths = {name: out}
                is_folder = False
                break
    try:
        if is_folder:
            out.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.writelines(_content(name, reported, slowest))
    except (OSError, ValueError) as refused:
        raise InvalidArgument(
            "-o", str(out), f"a folder, or a file .json, .html or .svg ({refused})"
        ) from None


def _content(name: str, reported: Report, slowest: int) -> Iterable[str]:
    """The content of one of the three files, in pieces."""
    if name == TRACE:
        return chrome_trace(reported.timelines[:HANDOVERS_OF_A_TRACE])
    if name == PAGE:
        return page(reported, max(slowest, ROWS_OF_A_PAGE))
    return [draw(reported.timelines[:slowest], len(reported.timelines), reported.notes)]
