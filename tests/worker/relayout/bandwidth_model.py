"""The share of a GPU's own copy bandwidth that the compiled kernel should reach: a prediction, not a measurement.

The programs that a multiprocessor holds at a time share it. Each waits for a chain of loads, one for another, while its
neighbours may run, and takes its turns to issue instructions:

    time per program = chain / programs that are resident + issue

Waiting and issuing are not assumed to overlap, so the truth is rather above. Constants of the GPUs are published
figures, except the copy bandwidth (nine tenths of the memory's) and the latencies under load, which are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TABLE_LOADS = 4
"""Loads of the table that wait for one another: program, piece, shape, unit."""
_REGISTERS, _WARPS, _PROGRAMS, _SCHEDULERS = 65536, 64, 32, 4
"""Of a multiprocessor; the same for all three."""
_REGISTERS_TOGETHER = 256
"""Registers are given to a warp in units of this many."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the model knows it.

    Attributes:
        copy_gb_s: bytes read and written.
        table_ns, memory_ns: from a load to its value in the second-level cache, where the table is, and in memory.
    """

    name: str
    architecture: int
    multiprocessors: int
    ghz: float
    copy_gb_s: float
    table_ns: float
    memory_ns: float


GPUS = (
    Gpu("A100 80 GB", 80, 108, 1.41, 0.9 * 2039, 200, 700),
    Gpu("H100 SXM", 90, 132, 1.755, 0.9 * 3352, 200, 800),
    Gpu("B200", 100, 148, 1.85, 0.9 * 8000, 300, 1000),
)


@dataclass(frozen=True)
class Program:
    """One program of a kernel.

    Attributes:
        registers: of a thread.
        instructions: of a thread, on the path that it takes.
        multiplications: those among them that the multiplier executes, at half the rate of others.
        moved_bytes: read and written.
    """

    warps: int
    registers: int
    instructions: int
    multiplications: int
    moved_bytes: int

    @classmethod
    def of(
        cls, opcodes: Mapping[str, int], *, warps: int, registers: int, moved_bytes: int
    ) -> Program:
        """A program whose threads execute these instructions."""
        multiplications = sum(
            count for opcode, count in opcodes.items() if opcode.startswith("IMAD")
        )
        return cls(
            warps, registers, sum(opcodes.values()), multiplications, moved_bytes
        )

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        of_warp = -(-self.registers * 32 // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
        warps = min(_WARPS, _REGISTERS // _SCHEDULERS // of_warp * _SCHEDULERS)
        return min(_PROGRAMS, warps // self.warps)


@dataclass(frozen=True)
class Prediction:
    """What the model says of one launch.

    Attributes:
        reach: the bandwidth that waiting and issuing allow, over the copy's.
        limit: the reason why it is not more: "memory" from 1 on, else "latency" or "instructions".
    """

    reach: float
    limit: str

    @property
    def share(self) -> float:
        """The expected share of the copy bandwidth."""
        return min(1.0, self.reach)


def predict(gpu: Gpu, program: Program) -> Prediction:
    """The prediction for long waves, in which every multiprocessor always has programs to run."""
    waiting_ns = (TABLE_LOADS * gpu.table_ns + gpu.memory_ns) / program.resident
    cycles = max(
        program.instructions / _SCHEDULERS, program.multiplications / (_SCHEDULERS / 2)
    )
    issuing_ns = program.warps * cycles / gpu.ghz
    reach = (
        gpu.multiprocessors
        * program.moved_bytes
        / (waiting_ns + issuing_ns)
        / gpu.copy_gb_s
    )
    return Prediction(
        reach,
        "memory"
        if reach >= 1
        else "latency"
        if waiting_ns > issuing_ns
        else "instructions",
    )
