"""The dump of an engine: no secrets in it, and nothing but a dump is read as one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.description_json import DUMP_VERSION, EngineDump, decode_dump, dump_of, encode_dump, engine_of
from kvferry.protocol.errors import InvalidDump
from kvferry.protocol.geometry import Interleave
from tests.protocol.samples import KEY, make_description, make_tensor, make_worker

METADATA = b"\x00the-agent's-metadata\xff"
DESCRIPTION = make_description(
    workers=(
        make_worker(
            agent="the-agents-name",
            agent_metadata=METADATA,
            tensors=(make_tensor(group=0, element_bytes=2, element_stride=32, interleave=Interleave(ranks=4, rank=3)),),
        ),
    )
)
DUMP = dump_of(DESCRIPTION)
TEXT = encode_dump(DUMP)


def changed(path: str, value: object) -> bytes:
    """The dump with one field changed by its dotted path; `...` removes it."""
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


def test_a_dump_comes_back_as_it_was() -> None:
    assert decode_dump(TEXT) == DUMP
    assert json.loads(TEXT)["kvferry_dump"] == DUMP_VERSION


def test_nothing_that_opens_a_connection_or_a_lease_is_in_it() -> None:
    for secret in (KEY, KEY.hex().encode(), METADATA, b"agent", b"mac_key", b"lease"):
        assert secret not in TEXT
    fields = set(EngineDump.__struct_fields__) - {"kvferry_dump"}
    assert fields == {"engine_id", "boot", "facts", "topology", "groups", "workers"}


def test_planning_gets_everything_that_the_engine_told_but_the_secrets() -> None:
    engine = engine_of(decode_dump(TEXT))
    assert dump_of(engine) == DUMP
    assert engine.workers[0].tensors == DESCRIPTION.workers[0].tensors
    assert engine.mac_key == bytes(32)


def test_a_dump_need_not_be_of_any_boot() -> None:
    dump = decode_dump(changed("boot", ...))
    assert dump.boot is None
    assert dump_of(engine_of(dump)).boot == "0" * 32


WRONG: list[tuple[str, object, str, str]] = [
    ("kvferry_dump", ..., "kvferry_dump", "a dump that"),
    ("kvferry_dump", 2, "kvferry_dump", "version 1"),
    ("kvferry_dump", True, "kvferry_dump", "version 1"),
    ("kvferry_dump", "1", "kvferry_dump", "version 1"),
    ("engine_id", ..., "engine_id", "a value"),
    ("engine_id", "a\nb", "engine_id", "`str` matching"),
    ("boot", "0", "boot", "`str` matching"),
    ("facts.dtype", 7, "facts.dtype", "`str`"),
    ("topology.tp", 0, "topology.tp", ">= 1"),
    ("groups", [], "groups", "length >= 1"),
    ("groups.0.block_tokens", -1, "groups[0].block_tokens", ">= 1"),
    ("workers", [], "workers", "length >= 1"),
    ("workers.0.place", None, "workers[0].place", "`object`"),
    ("workers.0.place.tp", "0", "workers[0].place.tp", "`int`"),
    ("workers.0.tensors", {}, "workers[0].tensors", "`array`"),
    ("workers.0.tensors.0.base", ..., "workers[0].tensors[0].base", "a value"),
    ("workers.0.tensors.0.base", 2**63, "workers[0].tensors[0].base", "<="),
    ("workers.0.tensors.0.base", 1.5, "workers[0].tensors[0].base", "`int`"),
    ("workers.0.tensors.0.heads", [0], "workers[0].tensors[0].heads", "length"),
    ("workers.0.tensors.0.format.dtype", "", "workers[0].tensors[0].format.dtype", "length >= 1"),
    ("mac_key", "x", "mac_key", "one of kvferry_dump, engine_id"),
    ("engine_ids", "x", "engine_ids", "did you mean engine_id? one of"),
    ("facts.dtpye", "x", "facts.dtpye", "did you mean dtype? one of"),
    ("groups.0.window", 5, "groups[0].window", "did you mean window_tokens? one of"),
    ("workers.0.agent", "x", "workers[0].agent", "one of place, memory"),
    ("workers.0.tensors.0.interlave", {}, "workers[0].tensors[0].interlave", "did you mean interleave?"),
    ("workers.0.tensors.0.interleave.rnk", 1, "workers[0].tensors[0].interleave.rnk", "did you mean rank?"),
]


@pytest.mark.parametrize(("path", "value", "field", "expected"), WRONG)
def test_what_does_not_fit_is_refused_by_field_and_expectation(
    path: str, value: object, field: str, expected: str
) -> None:
    with pytest.raises(InvalidDump) as refused:
        decode_dump(changed(path, value))
    assert refused.value.field == field
    assert expected in refused.value.expected


NO_DUMPS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"{}",
    b"\xff\xfe",
    TEXT[:-20],
    b"[" * 100_000,
    b'{"a":' * 50_000,
]


@pytest.mark.parametrize("text", NO_DUMPS, ids=range(len(NO_DUMPS)))
def test_what_is_no_dump_at_all_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidDump):
        decode_dump(text)


def test_a_file_that_is_too_long_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.protocol.description_json.MAX_DUMP_BYTES", len(TEXT) - 1)
    with pytest.raises(InvalidDump, match=f"at most {len(TEXT) - 1} bytes"):
        decode_dump(TEXT)


@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=1, max_size=4))
def test_no_scratched_dump_raises_anything_else(position: int, scratch: bytes) -> None:
    text = TEXT[:position] + scratch + TEXT[position + len(scratch) :]
    try:
        dump = decode_dump(text)
    except InvalidDump:
        return
    assert decode_dump(encode_dump(dump)) == dump


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from([path for path, *_ in WRONG if path != "kvferry_dump"]), JSON)
def test_no_value_in_any_field_raises_anything_else(path: str, value: object) -> None:
    try:
        text = changed(path, value)
        dump = decode_dump(text)
    except InvalidDump as refused:
        assert len(str(refused)) < 900  # noqa: PT017 - either outcome is right
        return
    assert msgspec.json.decode(encode_dump(dump))["kvferry_dump"] == DUMP_VERSION
