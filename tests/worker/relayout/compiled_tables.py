"""The tables of docs/relayout.md: the compiled kernel on each architecture, and what the model predicts from it."""

from __future__ import annotations

from collections import Counter

from kvferry.worker.relayout.kernel import TILE, WARPS, tile_of
from scripts import markdown
from tests.worker.relayout.bandwidth_model import GPUS, Gpu, Program, predict
from tests.worker.relayout.machine_code import MachineCode, compile_kernel

OTHER_SIZES = ((512, 4), (2048, 4))
"""Tiles and warps that were not chosen."""
_CONVERTED_CHUNK_BYTES = 8 * (2 + 1)
"""Read and written by a lane that converts eight bfloat16 elements to float8."""


def compiled(
    gpu: Gpu, *, converts: bool, tile: int = TILE, warps: int = WARPS
) -> tuple[MachineCode, Counter[str]]:
    """A variant, and the instructions of the path that matters: 16 bytes a lane, or eight elements from 16 bits to 8
    without scales; both with at most two axes."""
    code = compile_kernel(
        gpu.architecture, converts=converts, tile=tile_of(tile, converts), warps=warps
    )
    return code, code.path("STG.E.64", avoiding="LDG.E.64") if converts else code.path(
        "STG.E.128"
    )


def program(
    gpu: Gpu, *, converts: bool, tile: int = TILE, warps: int = WARPS
) -> Program:
    """The same for the model."""
    code, path = compiled(gpu, converts=converts, tile=tile, warps=warps)
    moved = tile_of(tile, converts) * (_CONVERTED_CHUNK_BYTES if converts else 32)
    return Program.of(path, warps=warps, registers=code.registers, moved_bytes=moved)


def resources() -> str:
    """The two variants that a worker's warm-up compiles."""
    rows: list[tuple[object, ...]] = []
    for converts in (False, True):
        for gpu in GPUS:
            code, path = compiled(gpu, converts=converts)
            loads, stores = (
                ", ".join(
                    f"{count} × {_bits(opcode)} bit"
                    for opcode, count in sorted(path.items())
                    if opcode[:3] == kind
                )
                for kind in ("LDG", "STG")
            )
            variant, spilled = (
                "converts" if converts else "copies",
                code.stack_bytes + code.local_bytes,
            )
            sizes = code.registers, spilled, len(code.opcodes), path.total()
            rows.append((variant, f"sm_{gpu.architecture}", *sizes, loads, stores))
    head = "variant | architecture | registers | spilled, B | instructions | on the path | loads | stores"
    return markdown.table(head, rows)


def predictions() -> str:
    """The model for the chosen tile and warps, for others, and for a conversion."""
    rows: list[tuple[object, ...]] = []
    kinds = [
        (False, TILE, WARPS),
        *((False, *size) for size in OTHER_SIZES),
        (True, TILE, WARPS),
    ]
    for converts, tile, warps in kinds:
        for gpu in GPUS:
            found = program(gpu, converts=converts, tile=tile, warps=warps)
            predicted = predict(gpu, found)
            variant, size = (
                "bfloat16 → float8" if converts else "copies",
                f"{tile_of(tile, converts)}, {warps}",
            )
            share = f"{predicted.share:.0%}{f' ({predicted.reach:.1f}×)' if predicted.reach > 1 else ''}"
            bandwidth = f"{predicted.share * gpu.copy_gb_s:.0f}"
            rows.append(
                (
                    variant,
                    size,
                    gpu.name,
                    found.resident,
                    bandwidth,
                    share,
                    predicted.limit,
                )
            )
    head = "variant | chunks, warps of a program | GPU | programs on a multiprocessor | predicted bandwidth, GB/s"
    return markdown.table(f"{head} | of the copy's | limited by", rows)


def gpus() -> str:
    """The model's constants."""
    rows = [
        (
            gpu.name,
            gpu.multiprocessors,
            gpu.ghz,
            *map(round, (gpu.copy_gb_s, gpu.table_ns, gpu.memory_ns)),
        )
        for gpu in GPUS
    ]
    return markdown.table(
        "GPU | multiprocessors | GHz | copy, GB/s | table load, ns | memory load, ns",
        rows,
    )


def _bits(opcode: str) -> int:
    """The width of an access."""
    widths = {"U8": 8, "U16": 16, "64": 64, "128": 128, "256": 256}
    return next((widths[part] for part in opcode.split(".") if part in widths), 32)
