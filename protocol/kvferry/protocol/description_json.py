"""An engine's description as JSON for planning, which may be stored, shared and edited.

It is an `EngineDescription` without the MAC key, NIXL's metadata and the lease tables: no secrets, and nothing to
connect with. The rest locates every byte of the cache, which is all that planning needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from kvferry.protocol.convert import as_type
from kvferry.protocol.errors import MISSING, UNKNOWN, InvalidDescription, cut, one_of
from kvferry.protocol.geometry import MAX_TENSORS, PagedTensor, Place, Topology
from kvferry.protocol.handshake import (
    MAX_ENGINE_TENSORS,
    CacheGroup,
    EngineDescription,
    LeaseTableAddress,
    ModelFacts,
    WorkerDescription,
)
from kvferry.protocol.ids import (
    MAX_GROUPS,
    MAX_WORKERS,
    NO_BOOT,
    Hex128,
    Positive,
    Text,
)
from kvferry.protocol.params import MAC_KEY_BYTES

DESCRIPTION_JSON_VERSION = 1
MAX_DESCRIPTION_JSON_BYTES = 256 << 20


class WorkerJson(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        place: among the ranks of its engine.
        memory: `DRAM` or `VRAM`, where the caches are.
        device: the device's index, 0 for DRAM.
        tensors: all paged tensors of its caches.
    """

    place: Place
    memory: Text
    device: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    tensors: Annotated[tuple[PagedTensor, ...], Meta(max_length=MAX_TENSORS)]


class EngineJson(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an engine's description that planning needs.

    Attributes:
        kvferry_description: version of this schema.
        engine_id: the described engine.
        boot: the boot of the engine to which the addresses belong; absent when they belong to none.
        facts: model facts that must be equal on both sides.
        topology: its parallel sizes.
        groups: its cache groups.
        workers: all of them.
    """

    kvferry_description: Positive = DESCRIPTION_JSON_VERSION
    engine_id: Text
    boot: Hex128 | None = None
    facts: ModelFacts
    topology: Topology
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    workers: Annotated[
        tuple[WorkerJson, ...], Meta(min_length=1, max_length=MAX_WORKERS)
    ]


def to_engine_json(engine: EngineDescription) -> EngineJson:
    """The part of an engine's description without secrets."""
    return msgspec.convert(engine, EngineJson, from_attributes=True)


def from_engine_json(engine_json: EngineJson) -> EngineDescription:
    """The description in the form that planning takes."""
    # Fields that the JSON lacks get values that give no access.
    return EngineDescription(
        engine_id=engine_json.engine_id,
        boot=engine_json.boot or NO_BOOT,
        mac_key=bytes(MAC_KEY_BYTES),
        facts=engine_json.facts,
        topology=engine_json.topology,
        groups=engine_json.groups,
        workers=tuple(map(_without_access, engine_json.workers)),
    )


def _without_access(worker: WorkerJson) -> WorkerDescription:
    return WorkerDescription(
        agent="none",
        agent_metadata=b"-",
        lease_table=LeaseTableAddress(address=0, slots=1),
        **structs.asdict(worker),
    )


def encode_engine_json(engine_json: EngineJson) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(engine_json), indent=1) + b"\n"


def decode_engine_json(text: bytes) -> EngineJson:
    """Read a description JSON.

    Raises:
        InvalidDescription: naming the first field that does not fit, its value and what was expected.
    """
    if len(text) > MAX_DESCRIPTION_JSON_BYTES:
        expected = f"at most {MAX_DESCRIPTION_JSON_BYTES} bytes"
        raise InvalidDescription("description", f"{len(text)} bytes", expected)
    try:
        plain = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as refused:
        expected = cut(f"JSON in UTF-8 ({refused})")
        raise InvalidDescription("description", text[:32], expected) from None
    _check_version(plain)
    engine_json = as_type(plain, EngineJson, InvalidDescription)
    num_tensors = sum(len(worker.tensors) for worker in engine_json.workers)
    if num_tensors > MAX_ENGINE_TENSORS:
        expected = f"at most {MAX_ENGINE_TENSORS} in all, as at a handshake"
        raise InvalidDescription("workers.tensors", num_tensors, expected)
    # Strict, unlike on the wire: in an edited file an unknown field is most likely a typo.
    for path, known_names in _unknown_fields(plain, engine_json, ""):
        name = path.rpartition(".")[2]
        raise InvalidDescription(
            cut(path) or repr(path), UNKNOWN, one_of(name, known_names)
        )
    return engine_json


def _check_version(plain: object) -> None:
    field = "kvferry_description"
    if not isinstance(plain, dict) or field not in plain:
        expected = "a description that `kvferry describe` or `description_file` wrote"
        raise InvalidDescription(field, MISSING, expected)
    version = plain[field]
    # `True` equals 1 in Python.
    if version is True or version != DESCRIPTION_JSON_VERSION:
        expected = f"version {DESCRIPTION_JSON_VERSION} of this schema"
        raise InvalidDescription(field, version, expected)


def _unknown_fields(
    plain: Any, decoded: object, path: str
) -> Iterator[tuple[str, list[str]]]:
    """The fields in plain objects that their types do not have, each with the fields that the type has."""
    if isinstance(decoded, tuple):
        pairs = zip(plain, decoded, strict=False)
        for index, (item, typed) in enumerate(pairs):
            yield from _unknown_fields(item, typed, f"{path}[{index}]")
    elif isinstance(decoded, msgspec.Struct) and isinstance(plain, dict):
        known_names = list(decoded.__struct_encode_fields__)
        for key, value in plain.items():
            where = f"{path}.{key}" if path else str(key)
            if key in known_names:
                yield from _unknown_fields(value, getattr(decoded, key), where)
            else:
                yield where, known_names
