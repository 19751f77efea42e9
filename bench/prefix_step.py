"""What questions about 32,768 tokens cost the step thread of the engine that is asked, while it decodes.

    python -m bench.prefix_step            # 2 minutes
    python -m bench.prefix_step --quick    # 15 seconds

vLLM's real scheduler drives a real connector, without a model: one request has a token computed in every step, and a
client asks for the first 32,768 tokens of a prompt that is cached, in 2,048 blocks, is given a lease and gives it
back, again and again. It writes `results/prefix_step.json`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import zmq

from bench.command import quick_or_whole
from bench.figures import Cell, Results, Table, Target
from bench.step_clock import Spread

TOKENS = 32_768
QUESTIONS = 200
_QUICK_QUESTIONS = 12
_WARM_UP = 3
LIMIT_US = 300.0
"""Most that a part takes of the step thread, and that a question adds to a step, at the 99th percentile."""
_PAUSE_S = 1e-3
"""Between steps: the listener's and the transfer threads' turn."""
_BLOCKS = 16_384
_LEASE_SLOTS = 1024
_TIMEOUT_S = 60.0
_CLIENT = "bench"

TAKE = "references taken"
END = "lease ended"
ORDERS = "orders made, blocks given back"
REPORT = "workers' report applied, blocks given back"
ADDED_SCHEDULER = "added to a step, scheduler"
ADDED_WORKER = "added to a step, worker"
SCHEDULER = "all calls of a step, scheduler"
WORKER = "all calls of a step, worker"
SCHEDULER_ALONE = "without a question, scheduler"
WORKER_ALONE = "without a question, worker"
PARTS = (TAKE, END, ORDERS, REPORT)
JUDGED = (*PARTS, ADDED_SCHEDULER, ADDED_WORKER)

WHAT = (
    f"A client asks an engine that decodes for the first {TOKENS:,} tokens of a prompt that it has in its cache, in "
    f"{TOKENS // 16:,} blocks, and gives the lease back when it has the ticket. Timed is what the engine's step "
    "thread does for that: each part in every step in which it has something to do, and all of kvferry's calls in "
    "the steps from the question until all blocks are back, beside as many steps without one. *Added to a step* is "
    "what all calls of such a step take beyond the median step without a question, so whatever disturbs the step as "
    "such counts as the question's. The wall clock has waits for the interpreter's lock, which the listener's thread "
    "has while it looks the prompt up."
)


@dataclass(slots=True)
class Times:
    """Nanoseconds of each call, or of each step: CPU time of the thread, and by the wall clock."""

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)

    def time(
        self, owner: Any, name: str, is_counted: Callable[..., bool] = lambda *_: True
    ) -> None:
        """Time a method of an object from now on.

        Args:
            is_counted: asked before each call with its arguments, whether it has anything to do.
        """
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            if not is_counted(*args):
                return call(*args, **options)
            wall_ns = time.perf_counter_ns()
            cpu_ns = time.thread_time_ns()
            try:
                return call(*args, **options)
            finally:
                self.cpu_ns.append(time.thread_time_ns() - cpu_ns)
                self.wall_ns.append(time.perf_counter_ns() - wall_ns)

        setattr(owner, name, timed)

    def beyond(self, usual: Times) -> Times:
        """The time of each, minus the median of the others; negative where it takes less."""
        cpu_ns = round(median(usual.cpu_ns))
        wall_ns = round(median(usual.wall_ns))
        return Times(
            [one - cpu_ns for one in self.cpu_ns],
            [one - wall_ns for one in self.wall_ns],
        )

    def forget(self) -> None:
        """Begin anew."""
        self.cpu_ns.clear()
        self.wall_ns.clear()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """n, then p50, p99 and the largest in µs of CPU time, then p50 and p99 by the wall clock."""
        cpu = Spread.of_ns(self.cpu_ns)
        wall = Spread.of_ns(self.wall_ns)
        return (cpu.count, cpu.p50, cpu.p99, cpu.max, wall.p50, wall.p99)


class Answerer:
    """The engine that is asked, its clocks, and the client's socket.

    Attributes:
        times: by the name of what is timed.
    """

    def __init__(self) -> None:
        # Only here: the engine needs vLLM, which takes seconds to import.
        from bench.step_engines import TimedNode
        from tests.fakes.memory_fabric import MemoryNetwork
        from tests.harness.core.loop import engine_core
        from tests.link.channel import client

        self._node = TimedNode(
            "kv_both", "memory", MemoryNetwork(), _BLOCKS, _LEASE_SLOTS
        )
        self._side = self._node.engine.connector.scheduler_side
        self._ending = ExitStack()
        self._ending.callback(self._node.close, idle=False)
        # Without it every step would look for it among the threads, as in no engine.
        self._ending.enter_context(engine_core(self._node.engine.scheduler))
        self._socket: zmq.Socket[bytes] = self._ending.enter_context(
            client(self._node.port)
        )
        self._number = 0
        self._prompt = [7 * index % 1000 + 1 for index in range(TOKENS + 1)]
        self._node.engine.add("own", self._prompt, max_tokens=1)
        self._node.answer("own")
        self._node.engine.add("decodes", self._prompt[:20], max_tokens=1 << 16)
        whole = (SCHEDULER, WORKER, SCHEDULER_ALONE, WORKER_ALONE)
        self.times = {name: Times() for name in (*PARTS, *whole)}
        leases = self._side.leases
        taking = self._side.prefix_leases
        self.times[TAKE].time(taking, "step", lambda: taking.needs_step)
        self.times[END].time(leases, "end")
        self.times[ORDERS].time(leases, "take_orders", lambda *_: leases.needs_step)
        self.times[REPORT].time(leases, "acknowledge", lambda _, over: bool(over))

    def close(self) -> None:
        """End the client and the engine."""
        self._node.engine.abort("decodes")
        self._ending.close()

    def ask(self) -> None:
        """One question, from its message until all blocks are back."""
        from kvferry.protocol.queries import PromptProgress

        first_step = self._num_steps
        self._number += 1
        self._socket.send_multipart([b"", self._question()])
        self._receive(PromptProgress.QUEUED)
        self._receive(PromptProgress.TICKET)
        self._release()
        self._until(self._is_over)
        self._note(first_step, SCHEDULER, WORKER)

    def rest(self, num_steps: int) -> None:
        """So many steps without a question."""
        first_step = self._num_steps
        for _ in range(num_steps):
            self._step()
        self._note(first_step, SCHEDULER_ALONE, WORKER_ALONE)

    def forget(self) -> None:
        """Forget what was timed."""
        self._node.forget()
        for times in self.times.values():
            times.forget()

    @property
    def _num_steps(self) -> int:
        return len(self._node.scheduler_clock.cpu_ns)

    def _note(self, first_step: int, scheduler: str, worker: str) -> None:
        node = self._node
        for name, clock in (
            (scheduler, node.scheduler_clock),
            (worker, node.worker_clock),
        ):
            self.times[name].cpu_ns += clock.cpu_ns[first_step:]
            self.times[name].wall_ns += clock.wall_ns[first_step:]

    def _question(self) -> bytes:
        from kvferry.protocol.digests import Prompt, digest_chain
        from kvferry.protocol.handshake import encode
        from kvferry.protocol.queries import (
            FindPrefixes,
            PrefixQuery,
            chain_bytes,
        )

        chain = chain_bytes(digest_chain(Prompt(tokens=self._prompt), TOKENS))
        query = PrefixQuery(number=self._number, chain=chain)
        return encode(FindPrefixes(client_id=_CLIENT, queries=(query,)))

    def _receive(self, expected: Any) -> None:
        from kvferry.protocol.queries import decode_answers

        self._until(lambda: self._socket.poll(0))
        (answer,) = decode_answers(self._socket.recv_multipart()[1]).answers
        if answer.progress is not expected:
            raise RuntimeError(f"answered {answer}; expected {expected}")

    def _release(self) -> None:
        from kvferry.scheduler.requests import LeaseState

        (lease,) = self._side.leases.leases(LeaseState.HELD)
        if len(lease.block_ids) != TOKENS // 16:
            raise RuntimeError(f"the lease has {len(lease.block_ids)} blocks")
        self._side.leases.release(lease.name)

    def _is_over(self) -> bool:
        leases = self._side.leases
        return not len(leases) and not leases.block_references.returning

    def _until(self, happened: Callable[[], object]) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while not happened():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not after {_TIMEOUT_S:g} s")
            self._step()

    def _step(self) -> None:
        self._node.step()
        time.sleep(_PAUSE_S)


def measure(questions: int) -> dict[str, Times]:
    """So many questions, each followed by steps without one."""
    answerer = Answerer()
    for _ in range(_WARM_UP):
        answerer.ask()
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
    answerer.forget()
    for _ in range(questions):
        asked = len(answerer.times[SCHEDULER].cpu_ns)
        answerer.ask()
        answerer.rest(len(answerer.times[SCHEDULER].cpu_ns) - asked)
    answerer.close()
    times = answerer.times
    times[ADDED_SCHEDULER] = times[SCHEDULER].beyond(times[SCHEDULER_ALONE])
    times[ADDED_WORKER] = times[WORKER].beyond(times[WORKER_ALONE])
    return times


def results_of(times: dict[str, Times], questions: int, *, quick: bool) -> Results:
    """A row for each part, judged by its 99th percentile."""
    columns = (
        "of the step thread",
        "n",
        "CPU p50, µs",
        "p99",
        "max",
        "wall p50, µs",
        "p99",
    )
    rows = [(name, *one.cells) for name, one in times.items() if one.cpu_ns]
    targets = tuple(
        Target.at_most(
            f"{questions} questions of {TOKENS:,} tokens, p99 of {by}: {name}",
            Spread.of_ns(samples).p99,
            LIMIT_US,
            "µs",
        )
        for name in JUDGED
        for by, samples in (
            ("CPU time", times[name].cpu_ns),
            ("the wall clock", times[name].wall_ns),
        )
    )
    return Results(
        command="python -m bench.prefix_step" + " --quick" * quick,
        what=WHAT,
        tables=(Table("What a question takes of the step thread", columns, rows),),
        targets=targets,
        notes=(
            "Both ends, scheduler and worker share one interpreter here, and so its lock: an engine has the scheduler "
            "and the listener in one process, its workers in others, and the client elsewhere.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    return quick_or_whole("prefix_step", __doc__, "few questions", _run)


def _run(quick: bool) -> Results:
    logging.disable(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    questions = _QUICK_QUESTIONS if quick else QUESTIONS
    return results_of(measure(questions), questions, quick=quick)


if __name__ == "__main__":
    raise SystemExit(main())
