"""Ranks of a real process group that are kept, so that many cases cost one start.

They are forked from one process that has imported everything and started no thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 60.0

RankFunction = Callable[..., Any]
"""Called on every rank with its process group, its device and the arguments of the call; found by its name."""


class RankPool:
    """Processes that are ranks of one another.

    Args:
        size: how many. There are groups of every power of two up to it.
        module: defines the functions that the ranks call; imported once, before they are forked.
        backend: `gloo` or `nccl`.
    """

    def __init__(self, size: int, module: str, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._command = f"import {module}; from {__name__} import main; main()"
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: list[Connection] = []
        self._directory = contextlib.ExitStack()

    def run(self, ranks: int, function: RankFunction, *arguments: object) -> list[Any]:
        """Call the function on the first ranks at the same time.

        Returns:
            The result of each rank.

        Raises:
            AssertionError: a rank has failed, or does not answer; then the next call starts new processes.
        """
        if self._process is None:
            self._start()
        answers: list[Any] = []
        deadline_s = time.monotonic() + _TIMEOUT_S
        try:
            for end in self._ends[:ranks]:
                end.send((ranks, function, arguments))
            for rank, end in enumerate(self._ends[:ranks]):
                assert end.poll(max(0.0, deadline_s - time.monotonic())), (
                    f"rank {rank} does not answer"
                )
                answers.append(end.recv())
        except (AssertionError, EOFError, OSError):
            self.close()
            raise
        for rank, (_, problem) in enumerate(answers):
            assert not problem, f"rank {rank}: {problem}"
        return [answer for answer, _ in answers]

    def close(self) -> None:
        """End the processes: the ranks when their pipes are closed, the one that forked them with the last rank."""
        for end in self._ends:
            end.close()
        if self._process is not None:
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                # Ranks that wait for one another in a collective: they are the process group of their parent.
                os.killpg(self._process.pid, 9)
                self._process.wait()
        self._process, self._ends = None, []
        self._directory.close()

    def _start(self) -> None:
        directory = self._directory.enter_context(tempfile.TemporaryDirectory())
        pairs = [Pipe() for _ in range(self.size)]
        theirs = [end.fileno() for _, end in pairs]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                self._command,
                self.backend,
                directory,
                *map(str, theirs),
            ],
            cwd=_ROOT,
            pass_fds=theirs,
            # Without a name for the interface, gloo looks this host's name up.
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        for _, end in pairs:
            end.close()
        self._ends = [end for end, _ in pairs]


@contextlib.contextmanager
def rank_pool(size: int, module: str, backend: str = "gloo") -> Iterator[RankPool]:
    pool = RankPool(size, module, backend)
    try:
        yield pool
    finally:
        pool.close()


def main() -> None:
    """Fork a rank for every pipe that the arguments name, and wait for them."""
    backend, directory, *pipes = sys.argv[1:]
    children = []
    for rank in range(len(pipes)):
        child = os.fork()
        if not child:
            ends = [Connection(int(pipe)) for pipe in pipes]
            try:
                _serve(backend, f"file://{directory}/store", rank, ends)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def _serve(backend: str, store: str, rank: int, ends: list[Connection]) -> None:
    timeout = timedelta(seconds=_TIMEOUT_S)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=len(ends), timeout=timeout
    )
    groups: dict[int, Any] = {}
    ranks = 1
    while ranks <= len(ends):
        groups[ranks] = dist.new_group(range(ranks), timeout=timeout)
        ranks *= 2
    with contextlib.suppress(EOFError):
        while True:
            ranks, function, arguments = ends[rank].recv()
            try:
                ends[rank].send((function(groups[ranks], device, *arguments), ""))
            except Exception:  # noqa: BLE001 - passed to the test, whatever it is
                ends[rank].send((None, traceback.format_exc()))
