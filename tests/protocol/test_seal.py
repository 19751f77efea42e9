"""The seal: it covers every field but those that are named here, and nothing on the way breaks it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import SHORTEST_LEASE_S, RemotePrefill, Ticket, read_params
from kvferry.protocol.seal import SEAL_KEY_BYTES, check_seal, new_seal_key, seal
from tests.protocol.samples import KEY, make_params, make_ticket

NOT_COVERED = {
    "do_remote_prefill": "its type allows one value",
    "do_remote_decode": "its type allows one value",
    "transfer_mode": "its type allows one value",
    "kvferry.mac": "it is the seal",
}

OTHERS: dict[str, list[Any]] = {
    "remote_engine_id": ["prefill-1", "prefill-0 ", "p"],
    "remote_request_id": ["cmpl-1-0-9f3b"],
    "remote_block_ids": [
        ((4, 9, 2), (18,)),
        ((4, 9, 3), (17,)),
        ((9, 4, 2), (17,)),
        ((4, 9), (2, 17)),
        ((4, 9, 2, 17),),
        ((17,), (4, 9, 2)),
        ((4, 9, 2), (17,), ()),
    ],
    "remote_host": ["10.0.0.2"],
    "remote_port": [5601],
    "tp_size": [2],
    "pp_size": [1],
    "dcp_size": [1],
    "remote_num_tokens": [299, 301],
    "kvferry.version": [2],
    "kvferry.boot": ["f" * 32],
    "kvferry.lease_slot": [8],
    "kvferry.lease_epoch": ["00f00ba40000002"],
    "kvferry.lease_s": [30.001, 60.0],
    "kvferry.digests": [
        ("a1" * 16,),
        ("b2" * 16, "a1" * 16),
        ("a1" * 16, "b3" * 16),
        ("a1" * 16, "b2" * 16, "c3" * 16),
    ],
    "kvferry.held_from": [(0,), (16, 0), (1 << 40,)],
}


def leaves() -> set[str]:
    """Every field of the params, the ticket's with its path."""
    names = {field.name for field in msgspec.structs.fields(RemotePrefill)} - {"kvferry"}
    return names | {f"kvferry.{field.name}" for field in msgspec.structs.fields(Ticket)}


def changed(params: RemotePrefill, path: str, value: object) -> RemotePrefill:
    if path.startswith("kvferry."):
        ticket = msgspec.structs.replace(params.kvferry, **{path.removeprefix("kvferry."): value})
        return msgspec.structs.replace(params, kvferry=ticket)
    return msgspec.structs.replace(params, **{path: value})


def test_every_field_is_either_tried_below_or_named_as_not_covered() -> None:
    assert set(OTHERS) | set(NOT_COVERED) == leaves()
    assert not set(OTHERS) & set(NOT_COVERED)


@pytest.mark.parametrize("path", OTHERS)
def test_a_change_of_any_covered_field_breaks_the_seal(path: str) -> None:
    sealed = seal(make_params(), KEY)
    check_seal(sealed, KEY)
    for other in OTHERS[path]:
        with pytest.raises(InvalidParams) as refused:
            check_seal(changed(sealed, path, other), KEY)
        assert refused.value.field == "kvferry.mac"


def test_fields_that_are_not_covered_have_one_value_only() -> None:
    for path in NOT_COVERED:
        if path == "kvferry.mac":
            continue
        raw = seal(make_params(), KEY).to_json()
        for other in (not raw[path], "push", 1, None):
            raw[path] = other
            try:
                read = read_params(raw)
            except InvalidParams:
                continue
            assert not isinstance(read, RemotePrefill) or getattr(read, path) == getattr(make_params(), path)


def test_text_cannot_move_from_one_field_to_its_neighbour() -> None:
    def mac(**texts: Any) -> str:
        return seal(make_params(**texts), KEY).kvferry.mac

    macs = {
        mac(remote_engine_id="ab", remote_request_id="c"),
        mac(remote_engine_id="a", remote_request_id="bc"),
        mac(remote_request_id="ab", remote_host="c"),
        mac(remote_request_id="a", remote_host="bc"),
        mac(remote_engine_id="a", remote_request_id="b"),
        mac(remote_engine_id="b", remote_request_id="a"),
    }
    assert len(macs) == 6


@pytest.mark.parametrize("parse_int", [int, float])
def test_a_seal_survives_json_and_float64_numbers(parse_int: type) -> None:
    sealed = seal(make_params(), KEY)
    arrived = read_params(json.loads(json.dumps(sealed.to_json()), parse_int=parse_int))
    assert isinstance(arrived, RemotePrefill)
    check_seal(arrived, KEY)
    assert arrived == sealed


@given(st.floats(SHORTEST_LEASE_S, 86400 * 7))
def test_any_lease_time_keeps_its_seal_through_a_router_that_prints_fifteen_digits(lease_s: float) -> None:
    sealed = seal(make_params(ticket=make_ticket(lease_s=round(lease_s, 3))), KEY)
    raw = sealed.to_json()
    raw["kvferry"]["lease_s"] = float(f"{raw['kvferry']['lease_s']:.15g}")
    arrived = read_params(raw)
    assert isinstance(arrived, RemotePrefill)
    check_seal(arrived, KEY)


@pytest.mark.parametrize(
    ("lease_s", "lease_ms"), [(30, 30_000), (0.5, 500), (0.0004, 0), (1.0006, 1001), (604800.0, 604_800_000)]
)
def test_lease_ms_is_the_nearest_millisecond(lease_s: float, lease_ms: int) -> None:
    assert make_ticket(lease_s=lease_s).lease_ms == lease_ms


def test_an_integral_lease_time_may_arrive_as_an_integer() -> None:
    raw = seal(make_params(), KEY).to_json()
    raw["kvferry"]["lease_s"] = 30
    arrived = read_params(raw)
    assert isinstance(arrived, RemotePrefill)
    check_seal(arrived, KEY)


def test_the_seal_of_another_key_or_no_seal_is_refused() -> None:
    sealed = seal(make_params(), KEY)
    for key in (bytes(32), KEY[::-1], KEY[:-1]):
        with pytest.raises(InvalidParams, match=r"kvferry\.mac"):
            check_seal(sealed, key)
    with pytest.raises(InvalidParams, match=r"kvferry\.mac"):
        check_seal(make_params(), KEY)


def test_sealing_again_changes_nothing() -> None:
    sealed = seal(make_params(), KEY)
    assert seal(sealed, KEY) == sealed
    assert msgspec.structs.replace(sealed, kvferry=make_ticket(mac="0" * 64)) == make_params()


def test_the_seal_is_this_one() -> None:
    """A change of what is covered, or of its order, must be noticed: other versions in a fleet check these bytes."""
    assert seal(make_params(), KEY).kvferry.mac == "e00a0aa5ede3f08d0935faab9e95dccb03c27b02a11972cafc6daa4c0a0446cb"


def test_every_boot_draws_its_own_key() -> None:
    keys = {new_seal_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {SEAL_KEY_BYTES}
