"""The params MAC: it covers every field but those that are named here, and nothing on the way changes it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import (
    SHORTEST_LEASE_S,
    RemotePrefill,
    Ticket,
    check_params_mac,
    read_params,
    sign_early,
    sign_params,
)
from tests.protocol.samples import KEY, make_params, make_ticket
from tests.protocol.test_params import remote_prefills

NOT_COVERED = {
    "do_remote_prefill": "its type allows one value",
    "do_remote_decode": "its type allows one value",
    "transfer_mode": "it is for routers; the reader treats all values alike",
    "kvferry.mac": "it is the MAC",
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
    "kvferry.stream_row": [0, 63],
    "kvferry.opens_within_s": [0.001, 10.0, 60.0],
}


def leaves() -> set[str]:
    """Every field of the params, the ticket's with its path."""
    names = {field.name for field in msgspec.structs.fields(RemotePrefill)} - {
        "kvferry"
    }
    return names | {f"kvferry.{field.name}" for field in msgspec.structs.fields(Ticket)}


def changed(params: RemotePrefill, path: str, value: object) -> RemotePrefill:
    if path.startswith("kvferry."):
        ticket = msgspec.structs.replace(
            params.kvferry, **{path.removeprefix("kvferry."): value}
        )
        return msgspec.structs.replace(params, kvferry=ticket)
    return msgspec.structs.replace(params, **{path: value})


def test_every_field_is_either_tried_below_or_named_as_not_covered() -> None:
    assert set(OTHERS) | set(NOT_COVERED) == leaves()
    assert not set(OTHERS) & set(NOT_COVERED)


@pytest.mark.parametrize("path", OTHERS)
def test_a_change_of_any_covered_field_fails_the_check(path: str) -> None:
    signed = sign_params(make_params(), KEY)
    check_params_mac(signed, KEY)
    for other in OTHERS[path]:
        with pytest.raises(InvalidParams) as refused:
            check_params_mac(changed(signed, path, other), KEY)
        assert refused.value.field == "kvferry.mac"


SPELLINGS: dict[str, Any] = {
    "unknown keys": lambda raw: (
        raw | {"host": "10.6.6.6", "remote_hosts": ["10.6.6.6"], "block_ids": [[1]]}
    ),
    "unknown keys of the ticket": lambda raw: (
        raw | {"kvferry": raw["kvferry"] | {"slot": 9, "remote_host": "10.6.6.6"}}
    ),
    "JSON": lambda raw: json.loads(json.dumps(raw)),
    "JSON whose numbers are floats": lambda raw: json.loads(
        json.dumps(raw), parse_int=float
    ),
    "a lease time that is an integer": lambda raw: (
        raw | {"kvferry": raw["kvferry"] | {"lease_s": 30}}
    ),
    "a lease time that rounds to as many milliseconds": lambda raw: (
        raw | {"kvferry": raw["kvferry"] | {"lease_s": 30.0004}}
    ),
    "no transfer mode": lambda raw: {
        key: value for key, value in raw.items() if key != "transfer_mode"
    },
    "another order": lambda raw: dict(reversed(raw.items())),
}


@pytest.mark.parametrize("how", SPELLINGS)
def test_what_the_mac_does_not_cover_cannot_change_what_is_read_or_from_which_engine(
    how: str,
) -> None:
    signed = sign_params(make_params(), KEY)
    arrived = read_params(SPELLINGS[how](signed.to_json()))
    assert isinstance(arrived, RemotePrefill)
    check_params_mac(arrived, KEY)
    same_lease = msgspec.structs.replace(
        arrived.kvferry, lease_s=signed.kvferry.lease_s
    )
    assert msgspec.structs.replace(arrived, kvferry=same_lease) == signed
    assert arrived.kvferry.lease_s == pytest.approx(signed.kvferry.lease_s, abs=0.0005)


@given(st.floats(SHORTEST_LEASE_S, 86400 * 7))
def test_any_lease_time_keeps_its_mac_through_a_router_that_prints_fifteen_digits(
    lease_s: float,
) -> None:
    signed = sign_params(
        make_params(ticket=make_ticket(lease_s=round(lease_s, 3))), KEY
    )
    raw = signed.to_json()
    raw["kvferry"]["lease_s"] = float(f"{raw['kvferry']['lease_s']:.15g}")
    arrived = read_params(raw)
    assert isinstance(arrived, RemotePrefill)
    check_params_mac(arrived, KEY)


@given(st.floats(0.001, 60.0))
def test_a_ticket_made_of_signed_params_is_signed_with_its_time(
    opens_within_s: float,
) -> None:
    early = sign_early(sign_params(make_params(), KEY), KEY, opens_within_s)
    check_params_mac(early, KEY)
    assert early.kvferry.opens_within_s == pytest.approx(opens_within_s, abs=0.0005)
    arrived = read_params(json.loads(json.dumps(early.to_json())))
    assert isinstance(arrived, RemotePrefill)
    check_params_mac(arrived, KEY)
    for other_s in (0.0, opens_within_s + 1.0):
        with pytest.raises(InvalidParams, match=r"kvferry\.mac"):
            check_params_mac(changed(early, "kvferry.opens_within_s", other_s), KEY)


def test_the_mac_of_another_key_or_no_mac_is_refused() -> None:
    signed = sign_params(make_params(), KEY)
    for key in (bytes(32), KEY[::-1], KEY[:-1]):
        with pytest.raises(InvalidParams, match=r"kvferry\.mac"):
            check_params_mac(signed, key)
    with pytest.raises(InvalidParams, match=r"kvferry\.mac"):
        check_params_mac(make_params(), KEY)


def test_the_mac_is_this_one() -> None:
    """A change of what is covered, or of its order, must be noticed: other versions in a fleet check these bytes."""
    assert (
        sign_params(make_params(), KEY).kvferry.mac
        == "e00a0aa5ede3f08d0935faab9e95dccb03c27b02a11972cafc6daa4c0a0446cb"
    )


def packed(value: object) -> bytes:
    """Msgpack of non-negative integers, text and tuples, read literally from its specification."""
    if isinstance(value, int):
        if value < 1 << 7:
            return bytes([value])
        code, size = next(
            (code, size)
            for code, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
            if value < 1 << 8 * size
        )
        return bytes([code]) + value.to_bytes(size, "big")
    if isinstance(value, str):
        raw = value.encode()
        if len(raw) < 32:
            return bytes([0xA0 | len(raw)]) + raw
        code, size = (0xD9, 1) if len(raw) < 1 << 8 else (0xDA, 2)
        return bytes([code]) + len(raw).to_bytes(size, "big") + raw
    assert isinstance(value, tuple)
    head = (
        bytes([0x90 | len(value)])
        if len(value) < 16
        else b"\xdc" + len(value).to_bytes(2, "big")
    )
    return head + b"".join(map(packed, value))


def slow_mac(params: RemotePrefill, key: bytes) -> str:
    """HMAC as RFC 2104 has it, over what the module says that is covered."""
    ticket = params.kvferry
    own = (
        ticket.version,
        ticket.boot,
        params.remote_engine_id,
        params.remote_request_id,
    )
    where = (
        params.remote_host,
        params.remote_port,
        params.tp_size,
        params.pp_size,
        params.dcp_size,
    )
    what = (
        params.remote_block_ids,
        params.remote_num_tokens,
        ticket.lease_slot,
        ticket.lease_epoch,
    )
    lasts = (round(ticket.lease_s * 1000), ticket.digests, ticket.held_from)
    row = () if ticket.stream_row is None else (ticket.stream_row,)
    mac = slow_hmac(
        packed(("kvferry-ticket-1", *own, *where, *what, *lasts, *row)), key
    )
    opens_ms = round(ticket.opens_within_s * 1000)
    return (
        slow_hmac(packed(("kvferry-early-ticket-1", mac, opens_ms)), key)
        if opens_ms
        else mac
    )


def slow_hmac(message: bytes, key: bytes) -> str:
    block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in block) for pad in (0x36, 0x5C))
    return hashlib.sha256(outer + hashlib.sha256(inner + message).digest()).hexdigest()


@given(remote_prefills(), st.binary(max_size=100))
def test_the_mac_is_what_its_definition_says(params: RemotePrefill, key: bytes) -> None:
    assert sign_params(params, key).kvferry.mac == slow_mac(params, key)
