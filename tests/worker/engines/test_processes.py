"""Engines in processes of their own, over the real fabric and the real side channel; some of them are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
START_S = 60.0
FAILED_WITHIN_S = 8.0  # the load's deadline is 5 s; the rest is for a busy machine


class EngineProcess:
    """The parent's end of `tests.worker.engine_process`."""

    def __init__(self, name: str, port: int, *, lease_s: float = 30.0, ucx: dict[str, str] | None = None) -> None:
        self.name, self.port = name, port
        self._answers: dict[int, dict[str, Any]] = {}
        self._commands = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.engine_process", name, str(port), str(lease_s)],
            cwd=ROOT,
            env={**os.environ, **(ucx or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def started(self) -> EngineProcess:
        """Wait until it answers; start several before waiting for one."""
        self.answer(0, START_S)
        return self

    def order(self, **command: Any) -> int:
        """Give a command. Returns its number."""
        assert self._process.stdin is not None
        self._commands += 1
        print(json.dumps({"id": self._commands, **command}), file=self._process.stdin, flush=True)
        return self._commands

    def answer(self, number: int, timeout_s: float = 20.0) -> dict[str, Any]:
        """The answer to a command."""
        wait_until(lambda: number in self._answers, f"{self.name} answers command {number}", timeout_s)
        return self._answers.pop(number)

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        params: dict[str, Any] = self.answer(self.order(do="prefill", tokens=tokens, seed=seed))["params"]
        return params

    def load(self, params: dict[str, Any], seed: int) -> int:
        return self.order(do="load", params=params, seed=seed)

    def state(self) -> dict[str, Any]:
        """How many leases there are, failed loads that may be written, and entries for slot reads in use."""
        answer = self.answer(self.order(do="state"))
        return {key: value for key, value in answer.items() if key != "id"}

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]] = answer


@pytest.fixture
def started() -> Iterator[list[EngineProcess]]:
    """The processes that a test starts, killed after it."""
    engines: list[EngineProcess] = []
    yield engines
    for engine in engines:
        engine.kill()


def _transfer(producer: EngineProcess, consumer: EngineProcess, seed: int) -> None:
    answer = consumer.answer(consumer.load(producer.prefill(13, seed), seed))
    assert answer["reason"] is None
    assert answer["good"]


@pytest.mark.parametrize("needs_help", [False, True], ids=["as NIXL comes", "tcp"])
def test_loads_survive_a_producer_that_is_killed_and_started_again(
    started: list[EngineProcess], needs_help: bool
) -> None:
    ucx = {"UCX_TLS": "tcp"} if needs_help else {}
    seed = random.randrange(2**31)
    print(f"seed={seed}")
    draw = random.Random(seed)
    port = free_port()
    started += [EngineProcess("P", port, ucx=ucx), EngineProcess("C", free_port(), ucx=ucx)]
    producer, consumer = started[0].started(), started[1].started()

    # Random lengths, several at once, every byte compared.
    for _ in range(6):
        seeds = [draw.randrange(10**6) for _ in range(8)]
        loads = [consumer.load(producer.prefill(draw.randint(1, 60), each), each) for each in seeds]
        answers = [consumer.answer(load) for load in loads]
        assert [answer["reason"] for answer in answers] == [None] * 8
        assert all(answer["good"] for answer in answers)
    wait_until(lambda: producer.state()["leases"] == 0, "all blocks are free")

    # Killed during loads: it stands still first, so that they are under way where they need its help. The kernel reads
    # from a process that stands still as well, so there they are good, and must have their bytes.
    spare, *offers = [producer.prefill(60, each) for each in range(9)]
    producer.freeze()
    loads = [consumer.load(params, each) for each, params in enumerate(offers, 1)]
    consumer.state()  # the loads have been ordered
    producer.kill()
    began_s = time.monotonic()
    answers = [consumer.answer(load, FAILED_WITHIN_S) for load in loads]
    assert all(answer["good"] or answer["reason"] for answer in answers), "reported good without its bytes"
    if needs_help:
        assert {answer["reason"] for answer in answers} == {"transfer"}

    # Killed before a load: that one notices.
    answer = consumer.answer(consumer.load(spare, seed=0), FAILED_WITHIN_S)
    assert answer["reason"] in ("transfer", "handshake")
    wait_until(lambda: consumer.state()["alive"] == 0, "nothing may be written any more", FAILED_WITHIN_S)
    assert time.monotonic() - began_s < 2 * FAILED_WITHIN_S

    # Back at the same address with another boot.
    started.append(EngineProcess("P", port, ucx=ucx).started())
    _transfer(started[-1], consumer, seed=3)
    wait_until(lambda: consumer.state() == {"leases": 0, "alive": 0, "entries": 0}, "nothing is left")


def test_a_consumer_that_is_killed_costs_the_producer_a_lease_and_no_more(started: list[EngineProcess]) -> None:
    started += [EngineProcess("P", free_port(), lease_s=1.0), EngineProcess("C", free_port())]
    producer, consumer = started[0].started(), started[1].started()
    _transfer(producer, consumer, seed=1)
    for each in range(5):
        consumer.load(producer.prefill(60, each), each)
    consumer.kill()
    began_s = time.monotonic()
    wait_until(lambda: producer.state()["leases"] == 0, "all blocks are free")
    assert time.monotonic() - began_s < FAILED_WITHIN_S
