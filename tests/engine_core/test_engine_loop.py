"""An idle engine is woken once in a while; a paused one is not idle before its leases are over."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from kvferry.connector.vllm_internals import EngineLoop
from tests.engine_core.test_idle import prefill, work
from tests.harness.core.scheduler import tokens

LEASE_S = 1.2


@pytest.fixture
def make_core() -> Iterator[Any]:
    """Makes vLLM engine cores with only the parts that their loop needs, and a thread like that of real ones."""
    over = threading.Event()
    threads = []

    def build(scheduler: Any = None) -> Any:
        core: Any = EngineCoreProc.__new__(EngineCoreProc)
        core.input_queue, core.aborts_queue = queue.Queue(), queue.Queue()
        core.scheduler, core.batch_queue, core.engines_running = scheduler, None, False
        core.shutdown_state, core.process_input_queue_block = EngineShutdownState.RUNNING, True
        core._idle_state_callbacks = []
        threads.append(threading.Thread(target=MethodType(lambda core: over.wait(), core)))
        threads[-1].start()
        return core

    yield build
    over.set()
    for thread in threads:
        thread.join()


def test_the_core_of_this_process_is_found_and_woken(make_core: Any) -> None:
    core = make_core()
    EngineLoop().wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_without_a_core_or_with_two_none_is_woken_and_nothing_happens(make_core: Any) -> None:
    EngineLoop().wake()
    cores = [make_core(), make_core()]
    EngineLoop().wake()
    assert all(core.input_queue.empty() for core in cores)


def test_an_unclaimed_lease_expires_in_time_although_the_engine_has_no_requests(
    make: Any, make_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.connector.scheduler_side.idle.MAX_IDLE_S", LEASE_S / 6)
    node = make("kv_producer", extra={"kv_lease_duration": LEASE_S})
    prefill(node, "p", tokens(100))
    core = make_core(node.engine.scheduler)
    began_s, idle_times = time.monotonic(), 0
    while not node.engine.is_whole:
        core._process_input_queue()  # vLLM's: it returns when there is something to do
        idle_times += 1
        work(node, most=100_000)  # here it does not sleep for a millisecond between two of them
        assert time.monotonic() < began_s + 20.0
    assert time.monotonic() >= began_s + LEASE_S * 0.9
    assert idle_times <= 8, "it was woken oftener than it had to be"
    assert node.engine.counted("leases_released", "expired") == 1


def test_a_pause_is_complete_when_no_lease_is_held_any_more_and_then_caches_can_be_emptied(
    make: Any, make_core: Any
) -> None:
    node = make("kv_producer", extra={"kv_lease_duration": 60.0})
    prefill(node, "p", tokens(100))
    core = make_core(node.engine.scheduler)
    core._finish_pause = lambda clear_cache: node.engine.scheduler.reset_prefix_cache(True, clear_cache)
    assert not core.has_work(), "it is idle"
    done = core.pause_scheduler("wait", clear_cache=True)
    assert done is not None
    for _ in range(5):
        node.step()
    assert core.has_work(), "a consumer may still come"
    node.engine.connector.scheduler_side.leases.release_all("release")
    node.until(lambda: not core.has_work())
    core._notify_idle_state_callbacks()
    assert done.result(timeout=0) is None
    core.resume_scheduler()
    prefill(node, "q", tokens(100))
    assert not core.has_work(), "it is idle again"
