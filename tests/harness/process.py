"""The test's end of engines that run in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forkserver import forkserver
from tests.harness import child
from tests.harness.cache_engine import free_port
from tests.harness.child import Start, State
from tests.harness.fault_fabric import Delivery, Point
from tests.waiting import wait_until

START_S = 180.0
"""The first engine of a session waits until the server that it is forked from has imported vLLM."""
SLACK_S = 15.0
"""Slack for every bound on a busy machine."""
TCP = {"UCX_TLS": "tcp"}
"""Reads need the producer's help, also on one host: with it, one that stands still is not read from."""


class EngineProcess:
    """One engine. Not started before `started` has returned: make several, then wait for them."""

    def __init__(self, start: Start) -> None:
        self.start, self.port = start, start.port
        self.points: list[Point] = []
        self._channel, theirs = forkserver().Pipe()
        self._process = forkserver().Process(target=child.run, args=(start, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._answers: dict[int, Any] = {}
        self._commands = 0

    def started(self) -> EngineProcess:
        """Wait until it answers."""
        self.answer(0, START_S)
        return self

    def order(self, do: str, **arguments: Any) -> int:
        """Give a command, see `tests.harness.child`; its number."""
        self._commands += 1
        self._channel.send((self._commands, do, arguments))
        return self._commands

    def answer(self, number: int, timeout_s: float = 30.0) -> Any:
        """The answer to a command."""
        self._read_until(lambda: number in self._answers, f"an answer to command {number}", timeout_s)
        return self._answers.pop(number)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Give a command and wait for its answer."""
        return self.answer(self.order(do, **arguments))

    def prefill(self, tokens: int, seed: int, **changes: Any) -> dict[str, Any]:
        """Prefill and hold; the params. `changes` get the producer's MAC."""
        params: dict[str, Any] = self.ask("prefill", tokens=tokens, seed=seed, changes=changes)
        return params

    def load(self, params: dict[str, Any], seed: int) -> int:
        """Order a load; its number."""
        return self.order("load", params=params, seed=seed)

    def state(self) -> State:
        state: State = self.ask("state")
        return state

    def deliver(self, delivery: Delivery) -> None:
        """Set the delivery of its notifications from now on."""
        self.ask("deliver", delivery=delivery)

    def stop_at(self, point: Point) -> None:
        """Make its next load stop at a point."""
        self.ask("stop_at", point=point)

    def until_at(self, point: Point, timeout_s: float = 30.0) -> None:
        """Wait until its transfer thread has stopped there."""
        self._read_until(lambda: point in self.points, f"stopped at {point.name}", timeout_s)
        self.points.remove(point)

    def load_until(self, point: Point, params: dict[str, Any], seed: int) -> int:
        """Order a load and wait until it stands still at a point; its number. `go` lets it go on."""
        self.stop_at(point)
        load = self.load(params, seed)
        self.until_at(point)
        return load

    def go(self) -> None:
        self.ask("go")

    def go_on_to(self, point: Point) -> None:
        """Go on from where its load stands still, and stop at a later point."""
        self.ask("go_on_to", point=point)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] in "Tt", "it stands still")

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, unless it is gone already; returns when nothing of it is left."""
        self._process.kill()
        self._process.join(START_S)
        assert self._process.exitcode is not None, f"{self.start.name} is not gone"
        self._channel.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _read_until(self, happened: Callable[[], object], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            here = self._channel.poll(max(0.001, deadline_s - time.monotonic()))
            assert here, f"{self.start.name}: not within {timeout_s:g} s: {what}"
            try:
                number, answer = self._channel.recv()
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"{self.start.name} has ended; wanted {what}") from None
            if number is None:
                self.points.append(answer)
            else:
                self._answers[number] = answer


class Fleet:
    """Engines of a test; whatever is left of them is killed by `close`."""

    def __init__(self) -> None:
        self._engines: list[EngineProcess] = []

    def start(self, *starts: Start) -> list[EngineProcess]:
        """Start engines and wait for all of them."""
        made = [EngineProcess(start) for start in starts]
        self._engines += made
        return [engine.started() for engine in made]

    def engine(self, name: str, port: int | None = None, **settings: Any) -> EngineProcess:
        """Start one engine and wait for it."""
        return self.start(Start(name=name, port=port or free_port(), **settings))[0]

    def pair(self, **settings: Any) -> tuple[EngineProcess, EngineProcess]:
        """A producer P and a consumer C with the same settings."""
        producer, consumer = self.start(*(Start(name=name, port=free_port(), **settings) for name in "PC"))
        return producer, consumer

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
