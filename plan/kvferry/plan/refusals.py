"""The reasons why two engines cannot be paired: all at once, each with the change that would help.

Also the checks of an engine's description beyond its types, made before any arithmetic relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.plan.tokens import share_of
from kvferry.protocol.errors import InvalidMessage, KvferryError
from kvferry.protocol.geometry import Interleave, PagedTensor
from kvferry.protocol.handshake import EngineDescription


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason.

    Attributes:
        field: the field that differs, e.g. `tensor_parallel_size`.
        producer, consumer: its value on each side, as text.
        change: the change that an operator can make.
    """

    field: str
    producer: str
    consumer: str
    change: str

    def __str__(self) -> str:
        return f"{self.field}: producer {self.producer}, consumer {self.consumer}; {self.change}"


class PlanRefused(KvferryError):
    """Two engines cannot be paired. `reasons` has all reasons."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        numbered = [
            f"({number}) {reason}" for number, reason in enumerate(self.reasons, 1)
        ]
        super().__init__("; ".join(numbered))


MAX_BLOCK_TOKENS = 65536
"""Tokens of a block that is divided into kernel blocks, at most."""


def check_description(engine: EngineDescription) -> None:
    """Check that a description does not contradict itself.

    Raises:
        InvalidMessage: naming the worker, the tensor and the field.
    """
    # Logs and reasons name workers by their places.
    places = [worker.place for worker in engine.workers]
    if len(set(places)) != len(places):
        raise InvalidMessage(
            "workers", f"{len(places)} workers", "a place of its own for every worker"
        )
    for index, group in enumerate(engine.groups):
        if group.policy != "state" and group.block_tokens > MAX_BLOCK_TOKENS:
            raise InvalidMessage(
                f"groups[{index}].block_tokens",
                group.block_tokens,
                f"at most {MAX_BLOCK_TOKENS}",
            )
    for index in range(len(engine.workers)):
        _check_worker(engine, index)


class _GroupBlocks(NamedTuple):
    """The blocks that a worker's tensors of one group have."""

    blocks: int
    block_tokens: int
    share: Interleave

    def __str__(self) -> str:
        text = f"{self.blocks} blocks of {self.block_tokens} tokens"
        if self.share.ranks > 1:
            text += f" on rank {self.share.rank} of {self.share.ranks}, runs of {self.share.run_tokens}"
        return text


def _check_worker(engine: EngineDescription, index: int) -> None:
    worker = engine.workers[index]
    names = {tensor.name for tensor in worker.tensors}
    if len(names) != len(worker.tensors):
        raise InvalidMessage(
            f"workers[{index}].tensors",
            f"{len(worker.tensors)} tensors",
            "distinct names",
        )
    reaches: dict[tuple[object, ...], int] = {}
    blocks_of_group: dict[int, _GroupBlocks] = {}
    for tensor in worker.tensors:
        # Layers usually have one shape, and need only one check; addresses differ.
        shape = (
            *tensor.shape,
            tensor.group,
            tensor.heads,
            tensor.interleave,
            len(tensor.scales),
        )
        reach = reaches.get(shape)
        if reach is not None and tensor.base + reach <= 1 << 63:
            continue
        where = f"workers[{index}].{tensor.layer}/{tensor.kind}"
        reaches[shape] = _check_base(where, tensor)
        _check_tensor(engine, where, tensor)
        # One list of blocks addresses every tensor of a group.
        blocks = _GroupBlocks(tensor.blocks, tensor.block_tokens, share_of(tensor))
        expected = blocks_of_group.setdefault(tensor.group, blocks)
        if blocks != expected:
            raise InvalidMessage(
                f"{where}.blocks",
                str(blocks),
                f"{expected}, like its group's other tensors",
            )


def _check_base(where: str, tensor: PagedTensor) -> int:
    """Check a tensor's base.

    Returns:
        The bytes from there to its end.
    """
    # NIXL counts the descriptors of a run in int32.
    if tensor.blocks * tensor.tiles >= 1 << 31:
        raise InvalidMessage(
            f"{where}.blocks",
            tensor.blocks,
            f"fewer than 2**31 cells of a head, {tensor.tiles} a block",
        )
    reach = (tensor.blocks - 1) * tensor.block_stride + tensor.block_extent
    if tensor.base + reach > 1 << 63:
        raise InvalidMessage(
            f"{where}.base", tensor.base, "an address whose last cell ends below 2**63"
        )
    return reach


def _check_tensor(engine: EngineDescription, where: str, tensor: PagedTensor) -> None:
    if tensor.group >= len(engine.groups):
        raise InvalidMessage(
            f"{where}.group", tensor.group, f"below {len(engine.groups)}"
        )
    if tensor.heads.stop < tensor.heads.start:
        raise InvalidMessage(
            f"{where}.heads", tensor.heads, "a range that does not end before it starts"
        )
    if tensor.block_tokens % tensor.tile_tokens:
        raise InvalidMessage(
            f"{where}.tile_tokens",
            tensor.tile_tokens,
            f"a divisor of {tensor.block_tokens}",
        )
    if tensor.interleave.rank >= tensor.interleave.ranks:
        raise InvalidMessage(
            f"{where}.interleave.rank",
            tensor.interleave.rank,
            f"below {tensor.interleave.ranks}",
        )
    # Elements of both sides must divide one another, as powers of two do (`run_merger`).
    element_bytes = tensor.element_bytes
    elements = 1
    if element_bytes:
        is_power_of_two = element_bytes & (element_bytes - 1) == 0
        if not is_power_of_two or tensor.cell_bytes % element_bytes:
            expected = f"0, or a power of two that divides {tensor.cell_bytes}"
            raise InvalidMessage(f"{where}.element_bytes", element_bytes, expected)
        elements = tensor.cell_bytes // element_bytes
    # The planner may unroll a block into its pieces: their number bounds its memory.
    if len(tensor.heads) * tensor.tiles * elements > 1 << 24:
        raise InvalidMessage(
            f"{where}.heads", tensor.heads, "at most 2**24 pieces of cells in a block"
        )
    if len(tensor.scales) not in (0, 1, len(tensor.heads)):
        expected = f"none, one, or one for each of {len(tensor.heads)} heads"
        raise InvalidMessage(
            f"{where}.scales", f"{len(tensor.scales)} scales", expected
        )
    group = engine.groups[tensor.group]
    if group.policy == "state":
        return
    if group.block_tokens % tensor.block_tokens:
        raise InvalidMessage(
            f"{where}.block_tokens",
            tensor.block_tokens,
            f"a divisor of {group.block_tokens}",
        )
    # Otherwise the number of blocks would not determine how many slots a rank has filled.
    share = tensor.interleave
    if share.ranks > 1 and group.block_tokens % share.run_tokens:
        raise InvalidMessage(
            f"{where}.interleave.run_tokens",
            share.run_tokens,
            f"a divisor of {group.block_tokens}",
        )
