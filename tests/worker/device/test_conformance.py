"""What kvferry relies on of a device, on the stand-in and on a real one: the other tests believe the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kvferry.worker.device import HOST, HostMemory
from kvferry.worker.relayout.shape import Shape
from kvferry.worker.relayout.wave_table import WaveTable
from tests.waiting import wait_until
from tests.worker.device.ports import Port


def on_another_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def test_a_mark_is_reached_when_the_work_before_it_has_finished_and_not_earlier(
    port: Port,
) -> None:
    with port.busy():
        mark = port.device.mark()
        assert not mark.reached()
    wait_until(mark.reached, "the work is done")
    assert mark.reached()


def test_an_own_stream_waits_for_no_other_and_marks_are_of_the_current_stream(
    port: Port,
) -> None:
    own = port.device.new_stream()
    with port.busy():
        with port.device.on(own):
            here = port.device.mark()
        there = port.device.mark()
        wait_until(here.reached, "the own stream goes on")
        assert not there.reached()
    wait_until(there.reached, "the work is done")


def test_work_on_the_default_stream_does_not_wait_for_an_own_stream(port: Port) -> None:
    with port.device.on(port.device.new_stream()), port.busy():
        here, there = port.device.mark(), []

        def mark() -> None:
            port.device.use()
            there.append(port.device.mark())

        on_another_thread(mark)  # its current stream is the default one
        wait_until(there[0].reached, "the default stream goes on")
        assert not here.reached()
    wait_until(here.reached, "the work is done")


def test_waiting_for_the_device_is_waiting_for_the_current_stream(port: Port) -> None:
    memory = port.device.empty(1 << 20)
    memory.zero_()
    mark = port.device.mark()
    port.device.synchronize()
    assert mark.reached()
    assert not memory.cpu().any()


def test_an_event_that_was_never_recorded_counts_as_passed(port: Port) -> None:
    assert port.cuda.Event().query()


def test_a_thread_has_no_context_before_it_uses_the_device_and_one_afterwards(
    port: Port,
) -> None:
    def use() -> None:
        assert not port.has_context()
        port.device.use()
        assert port.has_context()

    on_another_thread(use)


def test_a_copy_from_pinned_memory_takes_the_bytes_that_are_there_when_the_stream_gets_to_it(
    port: Port,
) -> None:
    here, there = port.device.empty_pinned(4096), port.device.empty(4096)
    assert port.is_pinned(here)
    here.fill_(1)
    with port.busy():
        there.copy_(here, non_blocking=True)
        here.fill_(2)
    mark = port.device.mark()
    wait_until(mark.reached, "it is copied")
    assert bool((there.cpu() == 2).all())


def test_a_copy_from_other_host_memory_has_taken_the_bytes_when_it_returns(
    port: Port,
) -> None:
    here, there = torch.full((4096,), 1, dtype=torch.uint8), port.device.empty(4096)
    assert not port.is_pinned(here)
    there.copy_(here, non_blocking=True)
    here.fill_(2)
    assert bool((there.cpu() == 1).all())


def test_memory_of_an_exact_size_is_pinned_until_it_is_unpinned(port: Port) -> None:
    memory = HostMemory(5000, port.device)
    assert memory.tensor.shape == (5000,)
    assert not memory.tensor.any()
    assert port.is_pinned(memory.tensor)
    for _ in range(2):
        memory.unpin()
    assert not port.is_pinned(memory.tensor)
    assert port.device.pin(memory.tensor, 8192) == 0
    port.device.unpin(memory.tensor)


def test_a_kernel_reads_and_writes_pinned_host_memory_by_its_own_address(
    port: Port,
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    host, there = HostMemory(4096, port.device), port.device.empty(64)
    host.tensor[:16] = 7
    addresses = host.tensor.data_ptr(), there.data_ptr(), host.tensor.data_ptr() + 32
    with port.kernels():
        for memories, way in (
            ((host.tensor, there), addresses[:2]),
            ((there, host.tensor), addresses[1:]),
        ):
            relayout = TritonRelayout([memories[0]], [memories[1]], port.device)
            table = WaveTable.from_rows(
                [Shape(axes=(), run=16)], [(*way, 0, 0, 1, 0)], [(0, 0, 0, 0)]
            )
            mark = relayout.try_start(table)
            assert mark is not None
            wait_until(mark.reached, "it is in place")
    assert host.tensor[:48].tolist() == [7] * 16 + [0] * 16 + [7] * 16
    host.unpin()


@pytest.mark.parametrize("shape", [(7,), (3, 512)])
def test_new_memory_is_bytes_of_its_shape(port: Port, shape: tuple[int, ...]) -> None:
    for memory in (port.device.empty(*shape), port.device.empty_pinned(*shape)):
        assert (tuple(memory.shape), memory.dtype) == (shape, torch.uint8)
        assert memory.data_ptr() % 16 == 0


def test_a_host_without_streams_is_synchronous() -> None:
    assert HOST.new_stream() is None
    with HOST.on(None):
        assert HOST.mark().reached()
    assert not HOST.is_cuda
