"""What an engine's description must satisfy beyond its types, before any arithmetic trusts it."""

from __future__ import annotations

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import EngineDescription


def check_description(engine: EngineDescription) -> None:
    """Check that a description does not contradict itself.

    Raises:
        InvalidMessage: naming the worker, the tensor and the field.
    """
    places = [worker.place for worker in engine.workers]
    if len(set(places)) != len(places):
        raise InvalidMessage("workers", f"{len(places)} workers", "a place of its own for every worker")
    for index, worker in enumerate(engine.workers):
        names = [tensor.name for tensor in worker.tensors]
        if len(set(names)) != len(names):
            raise InvalidMessage(f"workers[{index}].tensors", f"{len(names)} tensors", "distinct names")
        blocks_of: dict[int, tuple[int, int]] = {}
        for tensor in worker.tensors:
            where = f"workers[{index}].{tensor.layer}/{tensor.kind}"
            _check_tensor(engine, where, tensor)
            # One list of blocks addresses every tensor of a group.
            found = (tensor.blocks, tensor.block_tokens)
            if blocks_of.setdefault(tensor.group, found) != found:
                blocks, tokens = blocks_of[tensor.group]
                others = f"{blocks} blocks of {tokens} tokens, like its group's other tensors"
                raise InvalidMessage(f"{where}.blocks", f"{found[0]} blocks of {found[1]} tokens", others)


def _check_tensor(engine: EngineDescription, where: str, tensor: PagedTensor) -> None:
    if tensor.group >= len(engine.groups):
        raise InvalidMessage(f"{where}.group", tensor.group, f"below {len(engine.groups)}")
    if not len(tensor.heads):
        raise InvalidMessage(f"{where}.heads", tensor.heads, "at least one head")
    if tensor.block_tokens % tensor.tile_tokens:
        raise InvalidMessage(f"{where}.tile_tokens", tensor.tile_tokens, f"a divisor of {tensor.block_tokens}")
    if len(tensor.heads) * tensor.tiles > 1 << 20:
        raise InvalidMessage(f"{where}.heads", tensor.heads, "at most 2**20 cells in a block")
    last = (tensor.blocks - 1) * tensor.block_stride + (len(tensor.heads) - 1) * tensor.head_stride
    if tensor.base + last + (tensor.tiles - 1) * tensor.tile_stride + tensor.cell_bytes > 1 << 63:
        raise InvalidMessage(f"{where}.base", tensor.base, "an address whose last cell ends below 2**63")
    group = engine.groups[tensor.group]
    if group.block_tokens % tensor.block_tokens:
        raise InvalidMessage(f"{where}.block_tokens", tensor.block_tokens, f"a divisor of {group.block_tokens}")
