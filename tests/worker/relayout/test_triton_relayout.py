"""Around the kernel: too many or too large waves, and the space for tables."""

from __future__ import annotations

import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvferry.worker.device import Device
from kvferry.worker.relayout.shape import Shape
from kvferry.worker.relayout.wave_table import InvalidTable, Pieces, WaveTable
from tests.fakes.device_mark import FakeClock

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The device's clock, with kernels that are not run."""
    from kvferry.worker.relayout import triton_relayout

    made = FakeClock()
    monkeypatch.setattr(Device, "mark", lambda device: made.mark())
    monkeypatch.setattr(triton_relayout, "launch_relayout", lambda **arguments: None)
    return made


def wave(memory: torch.Tensor, units: int = 1) -> WaveTable:
    address = memory.data_ptr()
    return WaveTable.from_rows(
        [Shape(axes=(), run=16)],
        [(address, address + 32, 0, 0, units, 0)],
        [(0, 0, 0, 0)] * units,
    )


def test_a_table_is_not_written_again_before_its_wave_is_in_place(
    clock: FakeClock,
) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory], tables=2)
    for mark in clock.marks:  # those of the warm-up
        mark.over = True
    started = [relayout.try_start(wave(memory)) for _ in range(3)]
    assert [mark is not None for mark in started] == [True, True, False]
    assert relayout.launches == 2
    clock.marks[-1].over = True
    assert relayout.try_start(wave(memory)) is not None
    assert relayout.try_start(wave(memory)) is None


def test_the_table_of_a_launch_that_raised_is_not_used_before_the_device_has_done_with_it(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory], tables=1)
    for mark in clock.marks:  # those of the warm-up
        mark.over = True
    with monkeypatch.context() as patched:
        patched.setattr(
            "kvferry.worker.relayout.triton_relayout.launch_relayout",
            Mock(side_effect=RuntimeError),
        )
        with pytest.raises(RuntimeError):
            relayout.try_start(wave(memory))
    assert relayout.try_start(wave(memory)) is None
    clock.marks[-1].over = True
    assert relayout.try_start(wave(memory)) is not None


def test_a_wave_whose_table_is_too_large_is_refused_by_its_size(
    clock: FakeClock,
) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory], table_bytes=4096)
    with pytest.raises(
        InvalidTable, match=r"a wave's table has \d+ bytes; expected at most 4096"
    ):
        relayout.try_start(wave(memory, units=1000))
    assert relayout.launches == 0
    assert relayout.try_start(wave(memory)) is not None


def test_compiled_pieces_are_forgotten_with_their_waves(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.worker.relayout.device_table import DevicePieces
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    compile_pieces, made = DevicePieces.compile, list[weakref.ref[DevicePieces]]()

    def compiled(pieces: Pieces) -> DevicePieces:
        made.append(weakref.ref(one := compile_pieces(pieces)))
        return one

    monkeypatch.setattr(DevicePieces, "compile", compiled)
    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory])
    made.clear()  # those of the warm-up
    table = wave(memory)
    for _ in range(2):
        assert relayout.try_start(table) is not None
    assert [one() is not None for one in made] == [True], "once for all waves"
    del table
    assert made[0]() is None


def test_there_is_room_for_every_wave_of_the_same_pieces_also_where_shapes_no_longer_share_their_units() -> (
    None
):
    from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
    from kvferry.worker.relayout.kernel import TILE
    from kvferry.worker.relayout.triton_relayout import room_for

    shapes = (Shape(axes=(), run=16), Shape(axes=(), run=32))
    pieces = Pieces(shapes, np.array([(0, 0, 0, 0), (0, 0, 1, 0)], dtype=np.int64))
    units = np.zeros((4000, 4), dtype=np.int32)
    largest = WaveTable(pieces, ((0, 2000), (0, 2000)), units)
    apart = WaveTable(pieces, ((0, 2000), (2000, 4000)), units)
    assert DeviceTable.compile(
        apart, DevicePieces.compile(pieces), TILE
    ).num_bytes <= room_for(largest)
