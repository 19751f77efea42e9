"""An engine's description as JSON that may be kept, sent around and edited: no secrets, nothing to connect with.

Left out of `EngineDescription` are the MAC key, NIXL's metadata and the lease tables. What remains says where every
byte of the cache is, which is all that planning needs. Decoding is strict: unlike on the wire, an unknown field is an
error, because in a file that people edit it is a slip of the pen.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import as_type
from kvferry.protocol.errors import InvalidDump, cut
from kvferry.protocol.geometry import MAX_TENSORS, PagedTensor, Place, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, LeaseTable, ModelFacts, WorkerDescription
from kvferry.protocol.ids import MAX_WORKERS, Hex128, Positive, Text
from kvferry.protocol.params_mac import MAC_KEY_BYTES

DUMP_VERSION = 1
MAX_DUMP_BYTES = 256 << 20

_NO_BOOT = "0" * 32


class WorkerDump(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        place: among the ranks of its engine.
        memory: `DRAM` or `VRAM`, where the caches are.
        device: the device's index, 0 for DRAM.
        tensors: all that its caches hold.
    """

    place: Place
    memory: Text
    device: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    tensors: Annotated[tuple[PagedTensor, ...], Meta(max_length=MAX_TENSORS)]


class EngineDump(msgspec.Struct, frozen=True, kw_only=True):
    """All of an engine that planning needs.

    Attributes:
        kvferry_dump: version of this schema.
        engine_id: whose it is.
        boot: the life of the engine that the addresses are of; absent when they are of none.
        facts: what must be equal on both sides.
        topology: its parallel sizes.
        groups: its cache groups.
        workers: all of them.
    """

    kvferry_dump: Positive = DUMP_VERSION
    engine_id: Text
    boot: Hex128 | None = None
    facts: ModelFacts
    topology: Topology
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=64)]
    workers: Annotated[tuple[WorkerDump, ...], Meta(min_length=1, max_length=MAX_WORKERS)]


def dump_of(engine: EngineDescription) -> EngineDump:
    """The part of an engine's description that may be shown."""
    return EngineDump(
        engine_id=engine.engine_id,
        boot=engine.boot,
        facts=engine.facts,
        topology=engine.topology,
        groups=engine.groups,
        workers=tuple(
            WorkerDump(place=worker.place, memory=worker.memory, device=worker.device, tensors=worker.tensors)
            for worker in engine.workers
        ),
    )


def engine_of(dump: EngineDump) -> EngineDescription:
    """The dump as planning takes it. What was left out is filled with values that open nothing."""
    return EngineDescription(
        engine_id=dump.engine_id,
        boot=dump.boot or _NO_BOOT,
        mac_key=bytes(MAC_KEY_BYTES),
        facts=dump.facts,
        topology=dump.topology,
        groups=dump.groups,
        workers=tuple(
            WorkerDescription(
                place=worker.place,
                agent="none",
                agent_metadata=b"-",
                memory=worker.memory,
                device=worker.device,
                lease_table=LeaseTable(address=0, slots=1),
                tensors=worker.tensors,
            )
            for worker in dump.workers
        ),
    )


def encode_dump(dump: EngineDump) -> bytes:
    """The dump as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(dump), indent=1) + b"\n"


def decode_dump(text: bytes) -> EngineDump:
    """Read a dump.

    Raises:
        InvalidDump: naming the first field that does not fit, its value and what was expected.
    """
    if len(text) > MAX_DUMP_BYTES:
        raise InvalidDump("dump", f"{len(text)} bytes", f"at most {MAX_DUMP_BYTES} bytes")
    try:
        plain = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        raise InvalidDump("dump", text[:32], cut(f"JSON in UTF-8 ({refused})")) from None
    if not isinstance(plain, dict) or "kvferry_dump" not in plain:
        raise InvalidDump("kvferry_dump", "missing", "a dump that `kvferry describe` or `description_file` wrote")
    if plain["kvferry_dump"] is True or plain["kvferry_dump"] != DUMP_VERSION:
        raise InvalidDump("kvferry_dump", plain["kvferry_dump"], f"version {DUMP_VERSION} of this schema")
    dump = as_type(plain, EngineDump, InvalidDump)
    for path, names in _unknown(plain, dump, ""):
        near = difflib.get_close_matches(path.rpartition(".")[2], names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidDump(cut(path) or repr(path), "unknown", f"{hint}one of {', '.join(names)}")
    return dump


def _unknown(plain: Any, decoded: object, path: str) -> Iterator[tuple[str, list[str]]]:
    """The fields in plain objects that their types do not have, each with those that they do have."""
    if isinstance(decoded, tuple):
        for index, (item, typed) in enumerate(zip(plain, decoded, strict=False)):
            yield from _unknown(item, typed, f"{path}[{index}]")
    elif isinstance(decoded, msgspec.Struct) and isinstance(plain, dict):
        names = list(decoded.__struct_encode_fields__)
        for key, value in plain.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in names:
                yield where, names
            else:
                yield from _unknown(value, getattr(decoded, key), where)
