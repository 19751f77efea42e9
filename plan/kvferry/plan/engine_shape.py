"""The sizes of an engine as text: of the log, of `kvferry plan` and `kvferry describe`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.plan.wording import counted
from kvferry.protocol.geometry import PagedTensor, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of an engine decides its layout.

    Attributes:
        layers: of all workers.
        heads: of the whole model: those of attention, else of its states.
        dtypes: of its caches.
    """

    topology: Topology
    layers: int
    heads: int
    dtypes: tuple[str, ...]
    groups: tuple[CacheGroup, ...]

    @classmethod
    def from_engine(cls, engine: EngineDescription) -> EngineShape:
        """The shape of a whole engine."""
        tensors = [
            tensor
            for worker in engine.workers
            for tensor in worker.tensors
            if len(tensor.heads)
        ]
        shown = shown_tensors(engine, tensors)
        return cls(
            topology=engine.topology,
            layers=len(layer_order(engine)),
            heads=max((tensor.heads.stop for tensor in shown), default=0),
            dtypes=tuple(sorted({tensor.format.dtype for tensor in tensors})),
            groups=engine.groups,
        )

    def __str__(self) -> str:
        """The engine in one line: `TP 4 · PP 2 · 32 layers · 8 heads · bfloat16 · full, blocks of 16 tokens`."""
        groups = "; ".join(map(format_group, self.groups))
        counts = f"{counted(self.layers, 'layer')} · {counted(self.heads, 'head')}"
        return f"{format_topology(self.topology)} · {counts} · {'/'.join(self.dtypes)} · {groups}"


def shown_tensors(
    engine: EngineDescription, tensors: Sequence[PagedTensor]
) -> Sequence[PagedTensor]:
    """Those of the tensors by which heads are counted: of attention, else of states."""
    attention = [
        tensor for tensor in tensors if engine.groups[tensor.group].policy != "state"
    ]
    # A convolution's heads are its channels, thousands of them: they are no heads to a reader.
    states = [tensor for tensor in tensors if not tensor.kind.startswith("conv")]
    return attention or states or tensors


def format_topology(topology: Topology) -> str:
    """`TP 4 · PP 2`: the tensor-parallel size, and the other parallel sizes above 1."""
    parts = [f"TP {topology.tp}"]
    for name, size in (
        ("PP", topology.pp),
        ("PCP", topology.pcp),
        ("DCP", topology.dcp),
    ):
        if size > 1:
            parts.append(f"{name} {size}")
    return " · ".join(parts)


def format_group(group: CacheGroup) -> str:
    """`full, blocks of 16 tokens`."""
    if group.policy == "state":
        return "state"
    policy: str = group.policy
    if group.window_tokens:
        policy += f" of {group.window_tokens}"
    return f"{policy}, blocks of {counted(group.block_tokens, 'token')}"


def layer_order(engine: EngineDescription) -> dict[str, int]:
    """The index of every layer name among all layers of the engine."""
    # By name: workers describe the layers of their stages, and none of them the order of all.
    names = {tensor.layer for worker in engine.workers for tensor in worker.tensors}
    return {name: index for index, name in enumerate(sorted(names, key=natural))}


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts `layers.2` before `layers.10`."""
    return tuple(
        (text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)
    )
