"""How much of kvferry one must read to follow a prompt: what runs in a warm prefill and its load, on both engines.

| figure | counts, each once |
| --- | --- |
| files | product files of which a function runs |
| functions | functions, methods, lambdas and comprehensions that run; not what `dataclass` generates |
| calls from file to file | ordered pairs of files: a function of the first calls one of the second |

Warm: two handovers of other prompts came before, so that first contact is over. Everything counts from the prompt's
arrival at the producer until its blocks are free again, whichever half needs it, on the threads that carry the prompt:
the one that steps both engines, and their transfer threads. Threads beside them (the side channel's, a listener's) run
at times of their own.

What counts has run in each of forty such handovers. Of one alone it depended on how the threads met (whether the slot
was READY at the first look), and on what is due at intervals: 571 to 630 functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvferry.worker.loads import runner
from kvferry.worker.peers import registry
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens

MOST_FILES = 40
MOST_FUNCTIONS = 326
MOST_CALLS_BETWEEN_FILES = 81
"""As counted. Some functions run in all of the handovers or not, as the machine is busy, so their limit is some higher.
A commit that raises a limit says why."""
NUM_BLOCKS = 400
"""With room for the longest request beside these: an engine in which blocks are short does more in each step."""
WARM_UP = 2
COUNTED = 40
TRANSFER_THREAD = "kvferry-transfer"


class Path:
    """What has run on the counted threads: functions by file, and pairs of files.

    Attributes:
        threads: identities of the threads that are counted; none at first.
    """

    def __init__(self) -> None:
        self.threads: frozenset[int] = frozenset()
        self.functions: set[tuple[str, str]] = set()
        self.calls: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or threading.get_ident() not in self.threads:
            return
        file = product_file(frame)
        if file is None:
            return
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


def threads_of_a_prompt() -> frozenset[int]:
    """This one, which steps both engines, and the transfer threads."""
    transfers = [
        thread.ident
        for thread in threading.enumerate()
        if thread.name == TRANSFER_THREAD
    ]
    assert len(transfers) == 2, "one of each engine"
    return frozenset([threading.get_ident(), *filter(None, transfers)])


def test_a_warm_prefill_and_load_run_through_no_more_than_this(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checks at intervals are no part of a handover. On a busy machine each would take long enough for some.
    monkeypatch.setattr(registry, "CHECK_S", 3600.0)
    monkeypatch.setattr(runner, "_DEADLINE_CHECK_S", 3600.0)
    path = Path()
    functions: list[set[tuple[str, str]]] = []
    calls: list[set[tuple[str, str]]] = []
    # Before the engines are made: their threads must be seen too.
    threading.setprofile(path.note)
    sys.setprofile(path.note)
    try:
        producer = make("kv_producer", num_blocks=NUM_BLOCKS)
        consumer = make("kv_consumer", num_blocks=NUM_BLOCKS)
        for number in range(WARM_UP + COUNTED):
            if number == WARM_UP:
                path.threads = threads_of_a_prompt()
            path.functions, path.calls = set(), set()
            prompt = tokens(100, seed=number)
            params = producer.prefill(f"p{number}", prompt)
            consumer.decode(f"d{number}", prompt, params, producer)
            producer.until(lambda: producer.engine.is_whole)
            if number >= WARM_UP:
                functions.append(path.functions)
                calls.append(path.calls)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    in_each = set.intersection(*functions)
    files = {file for file, _ in in_each}
    num_calls = len(set.intersection(*calls))
    counts = (len(files), len(in_each), num_calls)
    print("files, functions, calls from file to file:", counts)
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
    assert len(in_each) <= MOST_FUNCTIONS, counts
    assert num_calls <= MOST_CALLS_BETWEEN_FILES, counts
    assert {
        "worker/loads/load.py",
        "scheduler/consumer/ledger.py",
        "link/renewer.py",
    } <= files
