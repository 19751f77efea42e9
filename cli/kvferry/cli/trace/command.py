"""`kvferry trace`: reads the recordings of engines and writes one timeline per handover."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.cli.trace.as_json import as_json
from kvferry.cli.trace.listing import print_listing
from kvferry.cli.trace.page import page
from kvferry.cli.trace.report import Report, report
from kvferry.cli.trace.waterfall import draw
from kvferry.trace.chrome import chrome_trace
from kvferry.trace.reading import read_recording
from kvferry.trace.summary import merge

PAGE, PICTURE, TRACE = "waterfall.html", "waterfall.svg", "trace.json"
ROWS_OF_A_PAGE = 200
HANDOVERS_OF_A_TRACE = 10_000
"""Most handovers (the slowest) in a Chrome trace; viewers in a browser cannot open more."""


def run_trace(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Raises `InvalidTrace` and `InvalidArgument`."""
    slowest = whole_option("--slowest", options.slowest, 1, 10_000)
    with _no_garbage():
        recording = read_recording(options.dirs)
        reported = report(recording, merge(recording), options.request)
        del recording
        if options.request is not None and not reported.timelines:
            raise InvalidArgument("--request", options.request, "a part of an id that is in these files")
        if options.out is not None:
            _write(Path(options.out), reported, slowest)
        if options.json:
            json.dump(as_json(reported, slowest), sys.stdout, indent=2)
            print()
        else:
            print_listing(sys.stdout, reported, slowest)
            if options.out is not None:
                print(f"\nwritten: {options.out}{_left_out(reported)}")
    return 0


def _write(out: Path, reported: Report, slowest: int) -> None:
    """Write a folder with all three files, or one file by its suffix."""
    one = {".json": _write_trace, ".html": _write_page, ".svg": _write_picture}.get(out.suffix.lower())
    try:
        if one is not None and not out.is_dir():
            one(out, reported, slowest)
            return
        out.mkdir(parents=True, exist_ok=True)
        _write_trace(out / TRACE, reported, slowest)
        _write_page(out / PAGE, reported, slowest)
        _write_picture(out / PICTURE, reported, slowest)
    except (OSError, ValueError) as refused:
        raise InvalidArgument("-o", str(out), f"a folder, or a file .json, .html or .svg ({refused})") from None


def _left_out(reported: Report) -> str:
    if len(reported.timelines) <= HANDOVERS_OF_A_TRACE:
        return ""
    return f" (the {HANDOVERS_OF_A_TRACE} slowest of {len(reported.timelines)} handovers are in the trace)"


def _write_trace(path: Path, reported: Report, _: int) -> None:
    _write_pieces(path, chrome_trace(reported.timelines[:HANDOVERS_OF_A_TRACE]))


def _write_page(path: Path, reported: Report, slowest: int) -> None:
    _write_pieces(path, page(reported, max(slowest, ROWS_OF_A_PAGE)))


def _write_picture(path: Path, reported: Report, slowest: int) -> None:
    _write_pieces(path, (draw(reported.timelines[:slowest], len(reported.timelines), reported.notes),))


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.writelines(pieces)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection: with millions of live events it takes longer than reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
