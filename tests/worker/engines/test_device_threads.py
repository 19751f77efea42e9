"""Threads that use the device: each has set it first, or its first call would make a context on GPU 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from tests.fakes.cuda import DEFAULT_STREAM, FakeCuda
from tests.harness.engine import SHAPE
from tests.harness.rig import Rig


def test_a_load_is_zeroed_by_one_launch_on_a_stream_of_its_own_that_was_used_at_registration(
    cuda: FakeCuda, rig: Rig
) -> None:
    with cuda.memory():
        producer = rig.engine("P", device=cuda.device)
        consumer = rig.engine("C", device=cuda.device)
    warmed_up = {call.stream for call in cuda.calls if call.name == "launch"}
    begun = len(cuda.calls)
    rig.transfer(producer, consumer, tokens=10)
    launches = [call for call in cuda.calls[begun:] if call.name == "launch"]
    assert len(launches) == 1, f"{SHAPE.layers} layers with a gap each"
    assert launches[0].thread == "kvferry-transfer"
    assert launches[0].stream in warmed_up - {DEFAULT_STREAM}


def test_after_a_launch_that_raised_the_blocks_wait_for_the_stream_that_it_was_on(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda.memory():
        producer = rig.engine("P", device=cuda.device)
        consumer = rig.engine("C", device=cuda.device)
    rig.transfer(producer, consumer, tokens=10)
    begun = len(cuda.calls)

    def launch_and_raise(**what: Any) -> None:
        cuda.launch_relayout(**what)
        raise RuntimeError("of the test")

    with monkeypatch.context() as patched:
        patched.setattr("kvferry.worker.relayout.triton_relayout.launch_relayout", launch_and_raise)
        load = consumer.load(producer.prefill(tokens=10).params)
        assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    used = [call for call in cuda.calls[begun:] if call.thread == "kvferry-transfer"]
    launched = next(index for index, call in enumerate(used) if call.name == "launch")
    marked = next(call for call in used[launched:] if call.name == "record")
    assert marked.stream == used[launched].stream != DEFAULT_STREAM
    asked = [call.stream for call in used[launched:] if call.name == "query"]
    assert used[launched].stream in asked


def test_every_thread_that_uses_the_device_has_set_it(cuda: FakeCuda, rig: Rig) -> None:
    with cuda.memory():
        producer = rig.engine("P", device=cuda.device)
        consumer = rig.engine("C", device=cuda.device, shape=replace(SHAPE, axes="bth"))
    rig.transfer(producer, consumer, tokens=10)
    assert consumer.seen.totals[-1].staged_bytes, "the load went through the pool"
    threads = {call.thread for call in cuda.calls}
    assert len(threads) == 2, "the engine's thread, and the transfer thread"
    assert not cuda.strays()
