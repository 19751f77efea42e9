"""The implementations, each behind one function: the destination's bytes after a wave.

Triton's interpreter is chosen when Triton is imported, for the whole process: it has a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.reference import ReferenceRelayout
from tests.worker.relayout.cases import Case

LARGE_BYTES = 200_000


class Outcome:
    """The destination after a wave, and the number of kernels launched."""

    def __init__(self, destination: NDArray[np.uint8], launches: int) -> None:
        self.destination = destination
        self.launches = launches


class Runner(Protocol):
    """One implementation."""

    def __call__(self, case: Case) -> Outcome: ...


Make = Callable[[list[torch.Tensor], list[torch.Tensor]], Relayout]


def run_here(case: Case, make: Make, device: torch.device) -> Outcome:
    """Run a case in this process."""
    source = torch.empty(
        case.source_at + len(case.source), dtype=torch.uint8, device=device
    )
    source[case.source_at :] = torch.from_numpy(case.source).to(device)
    destination = torch.empty(
        case.destination_at + len(case.destination), dtype=torch.uint8, device=device
    )
    destination[case.destination_at :] = torch.from_numpy(case.destination).to(device)
    relayout = make([source], [destination])
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the copies above are on another stream
    mark = relayout.try_start(case.at(source.data_ptr(), destination.data_ptr()))
    assert mark is not None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert mark.reached()
    return Outcome(destination[case.destination_at :].cpu().numpy(), relayout.launches)


def reference(case: Case) -> Outcome:
    """Plain torch on the CPU."""
    return run_here(case, ReferenceRelayout, torch.device("cpu"))


def on_cuda(case: Case) -> Outcome:
    """Triton on the first GPU."""
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    return run_here(case, TritonRelayout, torch.device("cuda", 0))


def _interpret(pipe: Connection) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    def make(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> Relayout:
        return TritonRelayout(sources, destinations, tile=tile, tables=1)

    while (received := pipe.recv()) is not None:
        case, tile = received
        try:
            pipe.send(run_here(case, make, torch.device("cpu")))
        except Exception as error:  # noqa: BLE001 (whatever it is, the test's process raises it)
            pipe.send(error)


class Interpreter:
    """Triton's interpreter in a process of its own. A program takes milliseconds, whatever its size: large tiles."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, case: Case) -> Outcome:
        self._pipe.send((case, 512 if len(case.source) < LARGE_BYTES else 32768))
        if not self._pipe.poll(300):
            raise TimeoutError("the interpreter says nothing")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Outcome)
        return answer


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """Start the interpreter's process; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_interpret, args=(theirs,), daemon=True)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    theirs.close()
    try:
        yield Interpreter(ours)
    finally:
        with suppress(OSError):  # a process that died reads nothing
            ours.send(None)
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
