"""The tables of docs/relayout.md: the compiled kernel on each architecture, and what the model predicts from it."""

from __future__ import annotations

from collections import Counter

from kvferry.worker.relayout.kernel import TILE, WARPS, tile_of
from tests.worker.relayout.bandwidth_model import GPUS, Gpu, Program, predict
from tests.worker.relayout.machine_code import MachineCode, compile_kernel

OTHER_SIZES = ((512, 4), (2048, 4))
"""Tiles and warps that were not chosen."""
_CONVERTED_CHUNK_BYTES = 8 * (2 + 1)
"""Read and written by a lane that converts eight bfloat16 elements to float8."""


def compiled(gpu: Gpu, *, converts: bool, tile: int = TILE, warps: int = WARPS) -> tuple[MachineCode, Counter[str]]:
    """A variant, and the instructions of the path that matters: 16 bytes a lane, or eight elements from 16 bits to 8
    without scales; both with at most two axes."""
    code = compile_kernel(gpu.architecture, converts=converts, tile=tile_of(tile, converts), warps=warps)
    return code, code.path("STG.E.64", avoiding="LDG.E.64") if converts else code.path("STG.E.128")


def program(gpu: Gpu, *, converts: bool, tile: int = TILE, warps: int = WARPS) -> Program:
    """The same for the model."""
    code, path = compiled(gpu, converts=converts, tile=tile, warps=warps)
    moved = tile_of(tile, converts) * (_CONVERTED_CHUNK_BYTES if converts else 32)
    return Program.of(path, warps=warps, registers=code.registers, moved_bytes=moved)


def resources() -> str:
    """The two variants that a worker's warm-up compiles."""
    rows = [
        "| variant | architecture | registers | spilled, B | instructions | on the path | loads | stores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for converts in (False, True):
        for gpu in GPUS:
            code, path = compiled(gpu, converts=converts)
            loads, stores = (
                ", ".join(
                    f"{count} × {_bits(opcode)} bit" for opcode, count in sorted(path.items()) if opcode[:3] == kind
                )
                for kind in ("LDG", "STG")
            )
            rows.append(
                f"| {'converts' if converts else 'copies'} | sm_{gpu.architecture} | {code.registers} "
                f"| {code.stack_bytes + code.local_bytes} | {len(code.opcodes)} "
                f"| {path.total()} | {loads} | {stores} |"
            )
    return "\n".join(rows)


def predictions() -> str:
    """The model for the chosen tile and warps, for others, and for a conversion."""
    rows = [
        "| variant | chunks, warps of a program | GPU | programs on a multiprocessor | predicted bandwidth, GB/s "
        "| of the copy's | limited by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = [(False, TILE, WARPS), *((False, *size) for size in OTHER_SIZES), (True, TILE, WARPS)]
    for converts, tile, warps in kinds:
        for gpu in GPUS:
            found = program(gpu, converts=converts, tile=tile, warps=warps)
            predicted = predict(gpu, found)
            rows.append(
                f"| {'bfloat16 → float8' if converts else 'copies'} | {tile_of(tile, converts)}, {warps} | {gpu.name} "
                f"| {found.resident} | {predicted.share * gpu.copy_gb_s:.0f} | {predicted.share:.0%}"
                f"{f' ({predicted.reach:.1f}×)' if predicted.reach > 1 else ''} | {predicted.limit} |"
            )
    return "\n".join(rows)


def gpus() -> str:
    """The model's constants."""
    rows = [
        "| GPU | multiprocessors | GHz | copy, GB/s | table load, ns | memory load, ns |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {gpu.name} | {gpu.multiprocessors} | {gpu.ghz} | {gpu.copy_gb_s:.0f} | {gpu.table_ns:.0f} "
        f"| {gpu.memory_ns:.0f} |"
        for gpu in GPUS
    ]
    return "\n".join(rows)


def _bits(opcode: str) -> int:
    """The width of an access."""
    widths = {"U8": 8, "U16": 16, "64": 64, "128": 128, "256": 256}
    return next((widths[part] for part in opcode.split(".") if part in widths), 32)
