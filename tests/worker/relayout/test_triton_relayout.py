"""Around the kernel: the compiled variants, the width of memory accesses, and too many or too large waves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from kvferry.worker.device import Device
from kvferry.worker.relayout.shape import Shape
from kvferry.worker.relayout.wave_table import InvalidTable, Pieces, WaveTable
from tests.fakes.device_mark import FakeClock

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import warnings
warnings.simplefilter("ignore")
from triton import compile
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from kvferry.worker.relayout import kernel

names = ("programs", "pieces", "shapes", "units", "scales")
types = dict(zip(names, ("*i32", "*i64", "*i64", "*i32", "*fp32")), CONVERTS="constexpr", TILE="constexpr")
aligned = {(index,): [["tt.divisibility", 16]] for index in range(5)}
converts, tile = CONVERTS, kernel.tile_of(kernel.TILE, CONVERTS)
source = ASTSource(kernel._relayout_kernel, types, {(5,): converts, (6,): tile}, aligned)
options = {"num_warps": kernel.WARPS, "enable_fp_fusion": False}
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.fixture(scope="module", params=[False, True], ids=["copies", "converts"])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, str]:
    """The kernel compiled for compute capability 9.0, which takes no GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    script = COMPILE.replace("CONVERTS,", f"{request.param},", 1).replace(", CONVERTS)", f", {request.param})", 1)
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    return request.param, finished.stdout


def test_the_compiled_kernel_has_wide_accesses_spills_nothing_and_rounds_as_the_definition(
    assembly: tuple[bool, str],
) -> None:
    converts, text = assembly
    for direction in ("ld", "st"):
        assert re.search(rf"{direction}\.global\.(v2\.b64|v4\.b32)", text), f"no {direction} of 16 bytes"
    assert ".local" not in text, "registers are spilled"
    assert "fma.rn.f32" not in text
    assert ("div.rn.f32" in text) == converts
    assert "div.full.f32" not in text


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
    return WaveTable.of([Shape(axes=(), run=16)], [(address, address + 32, 0, 0, units, 0)], [(0, 0, 0, 0)] * units)


def test_a_table_is_not_written_again_before_its_wave_is_in_place(clock: FakeClock) -> None:
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


def test_a_wave_whose_table_is_too_large_is_refused_by_its_size(clock: FakeClock) -> None:
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory], table_bytes=4096)
    with pytest.raises(InvalidTable, match=r"a wave's table has \d+ bytes; expected at most 4096"):
        relayout.try_start(wave(memory, units=1000))
    assert relayout.launches == 0
    assert relayout.try_start(wave(memory)) is not None


def test_compiled_pieces_are_forgotten_with_their_waves(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.worker.relayout.device_table import DevicePieces
    from kvferry.worker.relayout.triton_relayout import TritonRelayout

    compile_pieces, made = DevicePieces.of, list[weakref.ref[DevicePieces]]()

    def compiled(pieces: Pieces) -> DevicePieces:
        made.append(weakref.ref(one := compile_pieces(pieces)))
        return one

    monkeypatch.setattr(DevicePieces, "of", compiled)
    memory = torch.zeros(64, dtype=torch.uint8)
    relayout = TritonRelayout([memory], [memory])
    made.clear()  # those of the warm-up
    table = wave(memory)
    for _ in range(2):
        assert relayout.try_start(table) is not None
    assert [one() is not None for one in made] == [True], "once for all waves"
    del table
    assert made[0]() is None


def test_there_is_room_for_every_wave_of_the_same_pieces_also_where_shapes_no_longer_share_their_units() -> None:
    from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
    from kvferry.worker.relayout.kernel import TILE
    from kvferry.worker.relayout.triton_relayout import room_for

    shapes = (Shape(axes=(), run=16), Shape(axes=(), run=32))
    pieces = Pieces(shapes, np.array([(0, 0, 0, 0), (0, 0, 1, 0)], dtype=np.int64))
    units = np.zeros((4000, 4), dtype=np.int32)
    largest = WaveTable(pieces, ((0, 2000), (0, 2000)), units)
    apart = WaveTable(pieces, ((0, 2000), (2000, 4000)), units)
    assert DeviceTable.of(apart, DevicePieces.of(pieces), TILE).num_bytes <= room_for(largest)
