"""Engines that end in the middle of loads end without errors and close all that they opened."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.worker.fabric.port import Transfer, TransferState
from kvferry.worker.loads.load import Load
from kvferry.worker.worker import FerryWorker
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.waiting import wait_until

LOADS = 4
TOKENS = 100
COUNT = 4


@pytest.fixture(scope="module", autouse=True)
def _libraries_have_opened_theirs() -> None:
    producer, consumer = Node("kv_producer"), Node("kv_consumer")
    _load(producer, consumer)
    consumer.close()
    producer.close()


@pytest.mark.parametrize("first", ["producer", "consumer"])
@pytest.mark.parametrize("stage", ["connecting", "reading"])
def test_engines_that_end_in_the_middle_of_loads_end_quietly(
    stage: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = _opened()
    producer, consumer = Node("kv_producer"), Node("kv_consumer")
    worker = _worker(consumer)
    held = _hold_connecting(worker) if stage == "connecting" else _hold_reading(producer, consumer)
    for index in range(LOADS):
        prompt = tokens(TOKENS, seed=index + 20)
        consumer.engine.add(f"d{index}", prompt, producer.prefill(f"p{index}", prompt), max_tokens=COUNT)
    consumer.step()
    wait_until(held.is_reached, "every load is in the middle")
    for node in (producer, consumer) if first == "producer" else (consumer, producer):
        node.close(idle=False)
    held.ends()

    assert not worker._thread._thread.is_alive()
    loads = list(worker._thread.runner.alive())
    assert len(loads) == LOADS, "they were in the middle of it"
    assert sum(load.transfers() for load in loads) == 0
    assert worker._memory.slot_reads.free() == len(worker._memory.slot_reads.words)
    assert worker._memory.staging is not None
    assert worker._memory.staging.pool.free_bytes == worker._memory.staging.pool.capacity
    assert not _worker(producer)._memory.table.held()
    for node in (producer, consumer):
        ferry_of(node.engine.connector).scheduler_side.monitor.check_integrity()
        assert node.engine.used_blocks == LOADS * -(-TOKENS // BLOCK_TOKENS)
    wait_until(lambda: _opened() == before, "threads and files are gone")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@dataclass(frozen=True)
class _Held:
    """The stage at which all loads stand still.

    Attributes:
        is_reached: whether they have come to it.
        ends: lets them go on, where the end of the worker does not.
    """

    is_reached: Callable[[], bool]
    ends: Callable[[], None] = lambda: None


def _hold_connecting(worker: FerryWorker) -> _Held:
    """A first contact that outlives both engines."""
    handshakes = worker._thread.registry._handshakes
    handshake, reached, over = handshakes._handshake, threading.Event(), threading.Event()

    def slow(key: Any) -> Any:
        reached.set()
        over.wait()
        return handshake(key)

    handshakes._handshake = slow
    return _Held(reached.is_set, over.set)


def _hold_reading(producer: Node, consumer: Node) -> _Held:
    """Reads of a producer that is known, each in flight until the transfer thread winds up."""
    _load(producer, consumer)
    worker = _worker(consumer)
    fabric, runner = worker._fabric, worker._thread.runner
    post, poll, stop = fabric.post_read, fabric.poll, runner.stop
    held = set[Transfer]()

    def noted(local: Any, *rest: Any) -> Transfer:
        transfer = post(local, *rest)
        if local is not worker._memory.slot_reads.descriptors:
            held.add(transfer)
        return transfer

    def slow(transfer: Transfer) -> TransferState:
        return TransferState.IN_FLIGHT if transfer in held else poll(transfer)

    def stopping() -> list[Load]:
        held.clear()
        return stop()

    fabric.post_read, fabric.poll, runner.stop = noted, slow, stopping  # type: ignore[assignment, method-assign]
    return _Held(lambda: len(held) == LOADS)


def _load(producer: Node, consumer: Node) -> None:
    prompt = tokens(TOKENS)
    consumer.decode("whole", prompt, producer.prefill("whole-p", prompt))
    producer.until(lambda: producer.engine.is_whole)


def _worker(node: Node) -> FerryWorker:
    worker: FerryWorker = ferry_of(node.workers[0]).worker_side._worker
    return worker


def _opened() -> tuple[int, int]:
    """Threads and files of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
