"""The test's end of engines that run in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.harness import child
from tests.harness.child import Start, State
from tests.harness.children import START_S, Child
from tests.harness.fault_fabric import Point
from tests.ports import free_port

SLACK_S = 15.0
"""Slack for every bound on a busy machine."""
TCP = {"UCX_TLS": "tcp"}
"""Reads need the producer's help, also on one host: with it, one that stands still is not read from."""


class EngineProcess(Child):
    """One engine. Not started before `started` has returned: make several, then wait for them."""

    def __init__(self, start: Start) -> None:
        super().__init__(child.run, start)
        self.start, self.port = start, start.port
        self.points: list[Point] = []
        self._answers: dict[int, Any] = {}
        self._commands = 0

    def started(self) -> EngineProcess:
        """Wait until it answers."""
        self.answer(0, START_S)
        return self

    def order(self, do: str, **arguments: Any) -> int:
        """Give a command, see `tests.harness.child`; its number."""
        self._commands += 1
        self.send((self._commands, do, arguments))
        return self._commands

    def answer(self, number: int, timeout_s: float = 30.0) -> Any:
        """The answer to a command."""
        self._read_until(
            lambda: number in self._answers, f"an answer to command {number}", timeout_s
        )
        return self._answers.pop(number)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Give a command and wait for its answer."""
        return self.answer(self.order(do, **arguments))

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        """Prefill and hold; the params."""
        params: dict[str, Any] = self.ask("prefill", tokens=tokens, seed=seed)
        return params

    def load(self, params: dict[str, Any], seed: int) -> int:
        """Order a load; its number."""
        return self.order("load", params=params, seed=seed)

    def state(self) -> State:
        state: State = self.ask("state")
        return state

    def stop_at(self, point: Point) -> None:
        """Make its next load stop at a point."""
        self.ask("stop_at", point=point)

    def until_at(self, point: Point, timeout_s: float = 30.0) -> None:
        """Wait until its transfer thread has stopped there."""
        self._read_until(
            lambda: point in self.points, f"stopped at {point.name}", timeout_s
        )
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

    def _read_until(
        self, happened: Callable[[], object], what: str, timeout_s: float
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            try:
                number, answer = self.receive(deadline_s - time.monotonic())
            except TimeoutError:
                raise AssertionError(
                    f"{self.start.name}: not within {timeout_s:g} s: {what}"
                ) from None
            except EOFError:
                raise AssertionError(
                    f"{self.start.name} has ended; wanted {what}"
                ) from None
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

    def engine(
        self, name: str, port: int | None = None, **settings: Any
    ) -> EngineProcess:
        """Start one engine and wait for it."""
        return self.start(Start(name=name, port=port or free_port(), **settings))[0]

    def pair(self, **settings: Any) -> tuple[EngineProcess, EngineProcess]:
        """A producer P and a consumer C with the same settings."""
        producer, consumer = self.start(
            *(Start(name=name, port=free_port(), **settings) for name in "PC")
        )
        return producer, consumer

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
