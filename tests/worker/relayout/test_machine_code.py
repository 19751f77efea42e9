"""The kernel as it is compiled for each architecture: resources, accesses and variants; and the model of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvferry.worker.device import Device
from tests.fakes.device_mark import FakeClock
from tests.worker.relayout.bandwidth_model import GPUS, Gpu, Program, predict
from tests.worker.relayout.cases import random_case

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")

from kvferry.worker.relayout.kernel import TILE, WARPS, tile_of  # noqa: E402 (Triton)
from kvferry.worker.relayout.triton_relayout import TABLE_BYTES, TritonRelayout  # noqa: E402
from tests.worker.relayout.compiled_tables import OTHER_SIZES, program  # noqa: E402
from tests.worker.relayout.machine_code import ARCHITECTURES, MachineCode, gpu  # noqa: E402

MOST_REGISTERS = {False: 64, True: 80}
MOST_INSTRUCTIONS = {False: 620, True: 2400}
CHUNKS_OF_A_THREAD = TILE // WARPS // 32


@pytest.fixture(
    scope="module", params=ARCHITECTURES, ids=lambda architecture: f"sm_{architecture}"
)
def variants(request: pytest.FixtureRequest) -> dict[bool, MachineCode]:
    """What a worker's warm-up compiles: without and with conversions."""
    memory = torch.zeros(64, dtype=torch.uint8)
    with gpu(request.param) as driver:
        TritonRelayout([memory], [memory])
    assert driver.launches == [0, 1]
    return dict(zip((False, True), map(MachineCode.of, driver.compiled), strict=True))


@pytest.mark.parametrize("converts", [False, True], ids=["copies", "converts"])
def test_no_register_is_spilled_and_their_number_is_bounded(
    variants: dict[bool, MachineCode], converts: bool
) -> None:
    code = variants[converts]
    assert (code.local_bytes, code.count("LDL", "STL")) == (0, 0), "local memory"
    assert code.stack_bytes == 0, "spilled registers are on the stack"
    assert code.registers <= MOST_REGISTERS[converts]
    assert len(code.opcodes) <= MOST_INSTRUCTIONS[converts]


def test_a_lane_copies_16_bytes_in_one_load_and_one_store(
    variants: dict[bool, MachineCode],
) -> None:
    code = variants[False]
    path = code.path("STG.E.128")
    assert [path[opcode] for opcode in path if opcode.startswith("STG")] == [
        CHUNKS_OF_A_THREAD
    ]
    of_table = loads(path) - 2 * CHUNKS_OF_A_THREAD  # a chunk and its unit's offsets
    assert path["LDG.E.128"] >= 2 * CHUNKS_OF_A_THREAD
    assert of_table <= 8, "the table is read in words of 16 bytes"
    assert not code.count("LDS", "STS", "BAR"), "no lane waits for another"


def test_eight_elements_are_converted_by_one_load_and_one_store(
    variants: dict[bool, MachineCode],
) -> None:
    path = variants[True].path("STG.E.64", avoiding="LDG.E.64")
    of_a_thread = CHUNKS_OF_A_THREAD * tile_of(TILE, True) // TILE
    assert [path[opcode] for opcode in path if opcode.startswith("STG")] == [
        of_a_thread
    ]
    assert loads(path) <= 2 * of_a_thread + 8


def test_elements_are_rounded_as_the_definition_says(
    variants: dict[bool, MachineCode],
) -> None:
    for converts, code in variants.items():
        assert "fma.rn.f32" not in code.ptx
        assert ("div.rn.f32" in code.ptx) == converts
        assert "div.full.f32" not in code.ptx
        assert not code.count("F2F", "F2FP"), "a cast of the hardware's"


def test_a_load_launches_only_what_the_warm_up_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(over=True)
    monkeypatch.setattr(Device, "mark", lambda _: clock.mark())
    pool = torch.zeros(1 << 17, dtype=torch.uint8)
    with gpu(90) as driver:
        relayout = TritonRelayout([pool], [pool], table_bytes=TABLE_BYTES + 8, tables=2)
        compiled, launched = len(driver.compiled), Counter[int]()
        clock.over = False
        for seed in range(40):
            # Only the wave before is under way: the other table is used, which must be aligned too.
            for mark in clock.marks[:-1]:
                mark.over = True
            case = random_case(seed, converts=seed % 2 == 1)
            assert (
                relayout.try_start(case.at(pool.data_ptr(), pool.data_ptr()))
                is not None
            )
            launched[driver.launches[-1]] += 1
    assert compiled == len(driver.compiled) == 2, "compiled in the middle of a load"
    assert set(launched) == {0, 1}


@pytest.mark.parametrize("chosen", GPUS, ids=lambda one: one.name)
def test_tile_and_warps_are_enough_for_the_memory_and_near_the_best_of_the_model(
    chosen: Gpu,
) -> None:
    used, *others = (
        predict(chosen, program(chosen, converts=False, tile=tile, warps=warps))
        for tile, warps in ((TILE, WARPS), *OTHER_SIZES)
    )
    assert used.limit == "memory"
    assert used.reach >= 0.9 * max(one.reach for one in others)


def loads(path: Counter[str]) -> int:
    return sum(count for opcode, count in path.items() if opcode.startswith("LDG"))


EXAMPLE = Program(
    warps=4, registers=64, instructions=400, multiplications=100, moved_bytes=32768
)


@pytest.mark.parametrize(
    ("registers", "warps", "resident"),
    [(94, 4, 5), (64, 4, 8), (65, 4, 7), (32, 4, 16), (16, 1, 32), (255, 8, 1)],
)
def test_programs_that_are_resident(registers: int, warps: int, resident: int) -> None:
    """Registers are given in units of 256 to a warp, from the 16,384 of each of four parts of a multiprocessor."""
    assert replace(EXAMPLE, registers=registers, warps=warps).resident == resident


def test_an_example_of_the_model_worked_out_by_hand() -> None:
    device = Gpu("example", 90, 100, 1.0, copy_gb_s=4096.0, table_ns=200, memory_ns=800)
    # 8 are resident: 1600 / 8 = 200 ns of waiting; 4 warps of 400 / 4 = 100 cycles: 400 ns; 100 · 32768 B in 600 ns
    predicted = predict(device, EXAMPLE)
    assert predicted.reach == pytest.approx(100 * 32768 / 600 / 4096)
    assert (predicted.share, predicted.limit) == (1.0, "memory")
    faster = replace(device, copy_gb_s=8192.0)
    assert predict(faster, EXAMPLE).limit == "instructions"
    assert predict(faster, EXAMPLE).share == pytest.approx(100 * 32768 / 600 / 8192)
    assert predict(faster, replace(EXAMPLE, registers=255)).limit == "latency"
    # 250 multiplications take 125 cycles, 400 instructions 100
    assert predict(
        faster, replace(EXAMPLE, multiplications=250)
    ).reach == pytest.approx(100 * 32768 / 700 / 8192)
