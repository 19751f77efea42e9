"""The kernel's machine code for GPUs that are not there: Triton compiles for them, and the SASS is read back.

A stand-in for Triton's driver names the architecture and takes compiled kernels and launches, so the kernel is compiled
exactly as a launch compiles it. Triton keeps what it compiled on disk: only the first run takes seconds.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: A100, H100, B200."""
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);", re.MULTILINE
)
_LINE = re.compile(r"^(\.L_\w+):|^\s+/\*[0-9a-f]{4,}\*/\s.*?;", re.MULTILINE)
_TARGET, _CONDITION = re.compile(r"`\((\.L_\w+)\)"), re.compile(r"!?U?P\d")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass
class StandInDriver:
    """Triton's driver and its utilities, without a GPU.

    Attributes:
        compiled: kernels in the order in which they were compiled, as `MachineCode.of` takes them.
        launches: the index in `compiled` of each launched kernel.
    """

    architecture: int
    compiled: list[Any] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    _loaded: list[bytes] = field(default_factory=list)

    @property
    def utils(self) -> StandInDriver:
        return self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return (
            self.architecture
        )  # so that Triton's tables of kernels per device are apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 160 << 10}

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[None, int, int, int, int]:
        if cubin not in self._loaded:
            self._loaded.append(cubin)
        return (
            None,
            self._loaded.index(cubin),
            0,
            0,
            1024,
        )  # no module, so nothing to unload

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        from kvferry.worker.relayout.kernel import _relayout_kernel

        def launch(
            x: int, y: int, z: int, stream: int, function: int, *arguments: object
        ) -> None:
            self.launches.append(function)
            self.compiled = list(
                _relayout_kernel.device_caches[self.architecture][0].values()
            )

        return launch


@contextmanager
def gpu(architecture: int) -> Iterator[StandInDriver]:
    """A GPU that compiles for an architecture and runs nothing, with no kernel compiled yet."""
    from triton.runtime.driver import driver

    from kvferry.worker.relayout.kernel import _relayout_kernel

    stand_in = StandInDriver(architecture)
    driver.set_active(stand_in)
    _relayout_kernel.device_caches.pop(architecture, None)
    try:
        yield stand_in
    finally:
        _relayout_kernel.device_caches.pop(architecture, None)
        driver.set_active(None)


@cache
def compile_kernel(
    architecture: int, *, converts: bool, tile: int, warps: int
) -> MachineCode:
    """One variant; `tile` in chunks, as `launch_relayout` takes it."""
    from kvferry.worker.relayout import kernel

    numbers, scales = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    with gpu(architecture) as driver, patch.object(kernel, "WARPS", warps):
        kernel.launch_relayout(
            programs=numbers,
            pieces=numbers,
            shapes=numbers,
            units=numbers,
            scales=scales,
            num_programs=1,
            converts=converts,
            tile=tile,
        )
    return MachineCode.of(driver.compiled[0])


@dataclass
class Block:
    """A basic block: instructions with a single entry, and the blocks that may follow."""

    opcodes: list[str]
    next: list[int]


@dataclass(frozen=True)
class MachineCode:
    """One kernel.

    Attributes:
        registers: of a thread.
        stack_bytes, local_bytes: of a thread; local memory is where registers are spilled to.
        sass: the text of the instructions.
        ptx: the text that they were made from.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    sass: str
    ptx: str

    @classmethod
    def of(cls, kernel: Any) -> MachineCode:
        """Read one of `StandInDriver.compiled` with the tools in Triton's wheel."""
        from triton import knobs

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            usage = _output_of(knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
            sass = _output_of(knobs.nvidia.nvdisasm.path, "-c", str(path))
        found = _USAGE.search(usage)
        assert found is not None, usage
        registers, stack_bytes, local_bytes = map(int, found.groups())
        return cls(registers, stack_bytes, local_bytes, sass, kernel.asm["ptx"])

    @cached_property
    def opcodes(self) -> list[str]:
        return [found[2] for found in _INSTRUCTION.finditer(self.sass)]

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcodes begin with one of these."""
        return sum(opcode.startswith(prefixes) for opcode in self.opcodes)

    @cached_property
    def blocks(self) -> list[Block]:
        """The basic blocks in the order of their addresses. A call continues behind itself, and a jump through a table
        leads to the later blocks, up to the next such jump, that nothing else leads to."""
        blocks = [Block([], [])]
        labels: dict[str, int] = {}
        targets: dict[int, str] = {}
        for line in _LINE.finditer(self.sass):
            if line[1]:
                if blocks[-1].opcodes:
                    blocks[-1].next.append(len(blocks))
                    blocks.append(Block([], []))
                labels[line[1]] = len(blocks) - 1
            elif found := _INSTRUCTION.match(line[0]):
                predicate, opcode, operands = found.groups()
                blocks[-1].opcodes.append(opcode)
                if opcode.startswith(("BR", "EXIT", "RET")):
                    if target := _TARGET.search(operands):
                        targets[len(blocks) - 1] = target[1]
                    if predicate or _CONDITION.match(operands):
                        blocks[-1].next.append(len(blocks))
                    blocks.append(Block([], []))
        for source, label in targets.items():
            blocks[source].next.append(labels[label])
        reached = {number for block in blocks for number in block.next}
        tables = [
            number
            for number, block in enumerate(blocks)
            if block.opcodes[-1:] and "BRX" in block.opcodes[-1]
        ]
        for jump, stop in zip(tables, [*tables[1:], len(blocks)], strict=True):
            blocks[jump].next += [
                number for number in range(jump + 1, stop) if number not in reached
            ]
        return blocks

    def path(self, store: str, avoiding: str = "none") -> Counter[str]:
        """The opcodes of the shortest way from the start to an end that passes a block with `store` instructions, and
        no block with both those and `avoiding` ones, counted."""

        @cache
        def shortest(number: int, passed: bool) -> tuple[float, tuple[int, ...]]:
            block = self.blocks[number]
            if store in block.opcodes and avoiding in block.opcodes:
                return (math.inf, ())
            passed |= store in block.opcodes
            if not block.next:
                return (len(block.opcodes) if passed else math.inf, (number,))
            length, onward = min(
                shortest(one, passed) for one in block.next if one > number
            )
            return (length + len(block.opcodes), (number, *onward))

        length, numbers = shortest(0, False)
        if length == math.inf:
            raise LookupError(f"no way through the kernel has {store}")
        return Counter(
            opcode for number in numbers for opcode in self.blocks[number].opcodes
        )


def _output_of(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout
