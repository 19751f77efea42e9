"""Generated parts of docs/timelines.md: the output of commands on the example's files, and its picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.trace.example import write_example

SHOWN = "--slowest 12"


@contextmanager
def _example() -> Iterator[Path]:
    """A working directory with the example's files in `traces`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        write_example(Path(folder) / "traces")
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def page(text: str, with_output: Callable[[str], str]) -> str:
    """The page with the output of its commands."""
    with _example():
        return with_output(text)


def picture(output_of: Callable[[str], str]) -> str:
    """The picture of the example's slowest handovers."""
    with _example() as folder:
        output_of(f"trace traces -o waterfall.svg {SHOWN}")
        return (folder / "waterfall.svg").read_text()
