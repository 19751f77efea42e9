"""The test's end of the engines that run in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.faults.commands import Start, State
from tests.harness.cache_engine import free_port
from tests.harness.fault_fabric import Delivery, Point
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_S = 60.0
SLACK_S = 15.0
"""Slack for every bound on a busy machine."""
TCP = {"UCX_TLS": "tcp"}
"""Reads need the producer's help, also on one host: with it, one that stands still is not read from."""


class Zygote:
    """Forks engines; see `tests.faults.zygote`."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def fork(self, start: Start, channel: socket.socket) -> int:
        """Start an engine at the other end of `channel`; its process id."""
        self._requests.settimeout(START_S)
        socket.send_fds(self._requests, [msgspec.json.encode(start)], [channel.fileno()])
        return int(self._requests.recv(64))

    def close(self) -> None:
        self._requests.close()
        self._process.wait(START_S)


class EngineProcess:
    """One engine. Not started before `started` has returned: make several, then wait for them."""

    def __init__(self, zygote: Zygote, start: Start) -> None:
        self.start, self.port = start, start.port
        self.events: list[str] = []
        self._channel, theirs = socket.socketpair()
        self._pid = zygote.fork(start, theirs)
        theirs.close()
        self._answers: dict[int, dict[str, Any]] = {}
        self._commands = 0
        self._unread = b""

    def started(self) -> EngineProcess:
        """Wait until it answers."""
        self.answer(0, START_S)
        return self

    def order(self, do: str, **command: Any) -> int:
        """Give a command; its number."""
        self._commands += 1
        self._channel.sendall(json.dumps({"id": self._commands, "do": do, **command}).encode() + b"\n")
        return self._commands

    def answer(self, number: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """The answer to a command."""
        self._read_until(lambda: number in self._answers, f"an answer to command {number}", timeout_s)
        return self._answers.pop(number)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        return self.answer(self.order(do, **command))

    def prefill(self, tokens: int, seed: int, **changes: Any) -> dict[str, Any]:
        """Prefill and hold; the params. `changes` get the producer's MAC."""
        params: dict[str, Any] = self.ask("prefill", tokens=tokens, seed=seed, changes=changes)["params"]
        return params

    def load(self, params: dict[str, Any], seed: int) -> int:
        """Order a load; its number."""
        return self.order("load", params=params, seed=seed)

    def state(self) -> State:
        return msgspec.convert(self.ask("state"), State)

    def deliver(self, delivery: Delivery) -> None:
        """Set the delivery of its notifications from now on."""
        self.ask("deliver", delivery=delivery.value)

    def stop_at(self, point: Point) -> None:
        """Make its next load stop at a point."""
        self.ask("stop_at", point=point.value)

    def until_at(self, point: Point, timeout_s: float = 30.0) -> None:
        """Wait until its transfer thread has stopped there."""
        self._read_until(lambda: point.value in self.events, f"stopped at {point.name}", timeout_s)
        self.events.remove(point.value)

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
        self.ask("go_on_to", point=point.value)

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        wait_until(lambda: self._run_state() in "Tt", "it stands still")

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, unless it is gone already; returns when nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        wait_until(lambda: not self._run_state(), "it is gone", START_S)
        self._channel.close()

    def _run_state(self) -> str:
        """The letter in /proc; empty when there is no such process."""
        try:
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def _read_until(self, happened: Any, what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            self._channel.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                arrived = self._channel.recv(1 << 20)
            except TimeoutError:
                raise AssertionError(f"{self.start.name}: not within {timeout_s:g} s: {what}") from None
            assert arrived, f"{self.start.name} has ended; wanted {what}"
            *lines, self._unread = (self._unread + arrived).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "event" in answer:
                    self.events.append(answer["event"])
                else:
                    self._answers[answer["id"]] = answer


class Fleet:
    """Engines of a drill; whatever is left of them is killed by `close`."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._engines: list[EngineProcess] = []

    def start(self, *starts: Start) -> list[EngineProcess]:
        """Start engines and wait for all of them."""
        made = [EngineProcess(self._zygote, start) for start in starts]
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
