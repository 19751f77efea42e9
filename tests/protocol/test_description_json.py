"""The description JSON of an engine: no secrets in it, and nothing else is read as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.protocol.description_json import (
    DESCRIPTION_JSON_VERSION,
    EngineJson,
    decode_engine_json,
    encode_engine_json,
    from_engine_json,
    to_engine_json,
)
from kvferry.protocol.errors import InvalidDescription
from kvferry.protocol.geometry import Interleave
from tests.protocol.samples import KEY, make_description, make_tensor, make_worker

METADATA = b"\x00the-agent's-metadata\xff"
DESCRIPTION = make_description(
    workers=(
        make_worker(
            agent="the-agents-name",
            agent_metadata=METADATA,
            tensors=(
                make_tensor(
                    group=0,
                    element_bytes=2,
                    element_stride=32,
                    interleave=Interleave(ranks=4, rank=3),
                ),
            ),
        ),
    )
)
ENGINE_JSON = to_engine_json(DESCRIPTION)
TEXT = encode_engine_json(ENGINE_JSON)


def changed(path: str, value: object) -> bytes:
    """The description with one field changed by its dotted path; `...` removes it."""
    plain: Any = json.loads(TEXT)
    *holders, name = [int(key) if key.isdigit() else key for key in path.split(".")]
    holder = plain
    for key in holders:
        holder = holder[key]
    if value is ...:
        del holder[name]
    else:
        holder[name] = value
    return json.dumps(plain).encode()


def test_a_description_json_comes_back_as_it_was() -> None:
    assert decode_engine_json(TEXT) == ENGINE_JSON
    assert json.loads(TEXT)["kvferry_description"] == DESCRIPTION_JSON_VERSION


def test_nothing_that_opens_a_connection_or_a_lease_is_in_it() -> None:
    for secret in (KEY, KEY.hex().encode(), METADATA, b"agent", b"mac_key", b"lease"):
        assert secret not in TEXT
    fields = set(EngineJson.__struct_fields__) - {"kvferry_description"}
    assert fields == {"engine_id", "boot", "facts", "topology", "groups", "workers"}


def test_planning_gets_the_whole_description_but_the_secrets() -> None:
    engine = from_engine_json(decode_engine_json(TEXT))
    assert to_engine_json(engine) == ENGINE_JSON
    assert engine.workers[0].tensors == DESCRIPTION.workers[0].tensors
    assert engine.mac_key == bytes(32)


def test_a_description_json_need_not_be_of_any_boot() -> None:
    engine_json = decode_engine_json(changed("boot", ...))
    assert engine_json.boot is None
    assert to_engine_json(from_engine_json(engine_json)).boot == "0" * 32


WRONG: list[tuple[str, object, str, str]] = [
    ("kvferry_description", ..., "kvferry_description", "a description that"),
    ("kvferry_description", 2, "kvferry_description", "version 1"),
    ("kvferry_description", "1", "kvferry_description", "version 1"),
    ("engine_id", ..., "engine_id", "a value"),
    ("engine_id", "a\nb", "engine_id", "`str` matching"),
    ("topology.tp", 0, "topology.tp", ">= 1"),
    ("workers", [], "workers", "length >= 1"),
    ("workers.0.place.tp", "0", "workers[0].place.tp", "`int`"),
    ("workers.0.tensors.0.base", ..., "workers[0].tensors[0].base", "a value"),
    ("workers.0.tensors.0.base", 2**63, "workers[0].tensors[0].base", "<="),
    ("workers.0.tensors.0.heads", [0], "workers[0].tensors[0].heads", "length"),
    ("mac_key", "x", "mac_key", "one of kvferry_description, engine_id"),
    ("engine_ids", "x", "engine_ids", "did you mean engine_id? one of"),
    ("groups.0.window", 5, "groups[0].window", "did you mean window_tokens? one of"),
    (
        "workers.0.tensors.0.interleave.rnk",
        1,
        "workers[0].tensors[0].interleave.rnk",
        "did you mean rank?",
    ),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), WRONG)
def test_what_does_not_fit_is_refused_by_field_and_expectation(
    path: str, value: object, field: str, expected: str
) -> None:
    with pytest.raises(InvalidDescription) as refused:
        decode_engine_json(changed(path, value))
    assert refused.value.field == field
    assert expected in refused.value.expected


NOT_DESCRIPTIONS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    TEXT[:-20],
    b"[" * 100_000,
    b'{"a":' * 50_000,
]


@pytest.mark.parametrize("text", NOT_DESCRIPTIONS, ids=range(len(NOT_DESCRIPTIONS)))
def test_what_is_no_description_json_at_all_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidDescription):
        decode_engine_json(text)
