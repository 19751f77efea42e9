"""Around the kernel: too many or too large waves, and the space for tables."""

from __future__ import annotations

import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvferry.worker.device import Device
from kvferry.worker.peer_memory.port import DeviceBytes
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


@pytest.mark.parametrize("most_programs", [1, 7, 64, 1000])
@pytest.mark.parametrize("tile", [1, 16])
def test_a_launch_of_the_most_units_has_no_more_programs_than_it_may(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, most_programs: int, tile: int
) -> None:
    """One unit is launched whatever it needs; where more are, twice as many would be too many."""
    from kvferry.worker.relayout import triton_relayout

    launched: list[int] = []
    monkeypatch.setattr(triton_relayout, "MAX_PROGRAMS", most_programs)
    monkeypatch.setattr(
        triton_relayout,
        "launch_relayout",
        lambda **arguments: launched.append(arguments["num_programs"]),
    )
    memory = torch.zeros(4096, dtype=torch.uint8)
    relayout = triton_relayout.TritonRelayout([memory], [memory], tile=tile)
    address = memory.data_ptr()
    shapes = (Shape(axes=(), run=160), Shape(axes=(), run=37))
    rows = [(address, address + 1024, number % 2, 0) for number in range(5)]
    pieces = Pieces(shapes, np.array(rows, dtype=np.int64))

    def programs_of(units: int) -> int:
        table = WaveTable(
            pieces, ((0, units),) * 2, np.zeros((units, 4), dtype=np.int32)
        )
        launched.clear()
        for mark in clock.marks:
            mark.over = True
        assert relayout.try_start(table) is not None
        return launched[0]

    most = relayout.most_units(pieces)
    if most > 1:
        assert programs_of(most) <= most_programs
    assert programs_of(2 * most) > most_programs // 2 or most_programs < 64


def test_with_other_sources_only_these_are_read_and_they_are_kept(
    clock: FakeClock,
) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    class Mapped:
        pass

    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout((), [memory])
    for mark in clock.marks:
        mark.over = True
    with pytest.raises(InvalidTable, match="source of shape 0"):
        relayout.try_start(wave(memory))
    mapped = Mapped()
    is_kept = weakref.ref(mapped)
    reading = relayout.reading([DeviceBytes(memory.data_ptr(), 64, mapped)])
    del mapped
    assert reading.try_start(wave(memory)) is not None
    assert is_kept() is not None
    with pytest.raises(InvalidTable, match="source of shape 0"):
        relayout.try_start(wave(memory))
    del reading
    assert is_kept() is None, "with its last user, not when it is collected"
