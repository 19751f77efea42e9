"""How much of kvferry one must read to follow a prompt: what runs in a warm prefill and its load, on both engines.

| figure | counts, each once |
| --- | --- |
| files | product files of which a function runs |
| functions | functions, methods, lambdas and comprehensions that run; not what `dataclass` generates |
| calls from file to file | ordered pairs of files: a function of the first calls one of the second |

Warm: two handovers of other prompts came before, so that first contact is over. Everything counts from the prompt's
arrival at the producer until its blocks are free again, on all threads of both engines, whichever half needs it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens

# A tenth more than on a quiet machine: what the threads beside the path do meanwhile depends on its load.
MOST_FILES = 112
MOST_FUNCTIONS = 650
MOST_CALLS_BETWEEN_FILES = 245
"""What is there, and a little that depends on how the threads meet. One that must grow says why in its commit."""
WARM_UP = 2


class Path:
    """What has run while `is_counting`: files, functions by file, and pairs of files."""

    def __init__(self) -> None:
        self.is_counting = False
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.calls: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_counting or event != "call":
            return
        file = product_file(frame)
        if file is None:
            return
        self.files.add(file)
        self.functions.add((file, frame.f_code.co_qualname))
        caller = product_file(frame.f_back)
        if caller is not None and caller != file:
            self.calls.add((caller, file))


def product_file(frame: FrameType | None) -> str | None:
    """The module of the product that the frame runs, as `worker/worker.py`."""
    if frame is None:
        return None
    _, found, module = frame.f_code.co_filename.rpartition("/kvferry/")
    is_product = (
        found and module.endswith(".py") and not module.startswith(("tests/", "bench/"))
    )
    return module if is_product else None


def test_a_warm_prefill_and_load_run_through_no_more_than_this(
    make: Callable[..., Node],
) -> None:
    path = Path()
    # Before the engines are made: their threads must be seen too.
    threading.setprofile(path.note)
    sys.setprofile(path.note)
    try:
        producer, consumer = make("kv_producer"), make("kv_consumer")
        for number in range(WARM_UP + 1):
            path.is_counting = number == WARM_UP
            prompt = tokens(100, seed=number)
            params = producer.prefill(f"p{number}", prompt)
            consumer.decode(f"d{number}", prompt, params, producer)
            producer.until(lambda: producer.engine.is_whole)
        path.is_counting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    counts = (len(path.files), len(path.functions), len(path.calls))
    print("files, functions, calls from file to file:", counts)
    shown = "\n".join(sorted(path.files))
    assert len(path.files) <= MOST_FILES, shown
    assert len(path.functions) <= MOST_FUNCTIONS, counts
    assert len(path.calls) <= MOST_CALLS_BETWEEN_FILES, counts
    assert {
        "worker/loads/load.py",
        "scheduler/consumer/ledger.py",
        "link/renewer.py",
    } <= path.files
