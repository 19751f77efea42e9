"""The side channel's messages: their bytes, their evolution, and frames that are none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    MAX_PART_BYTES,
    MAX_PART_FRAME_BYTES,
    MAX_RENEWALS,
    MAX_REQUEST_BYTES,
    EngineDescription,
    Hello,
    LeaseName,
    PartsReceived,
    PartsSent,
    Refused,
    Release,
    Renew,
    decode_reply,
    decode_request,
    decode_worker,
    encode,
)
from kvferry.protocol.queries import decode_answers
from tests.protocol.frames import (
    decode_plain,
    encode_plain,
    hostile_frames,
    refused,
    wrong_values,
)
from tests.protocol.samples import (
    ANSWERS,
    ASKS,
    BOOT,
    EPOCH,
    HELLO,
    LEASES,
    REPLIES,
    REQUESTS,
    make_description,
    make_tensor,
    make_worker,
)

Decode = Callable[[bytes], Any]
DECODERS: list[tuple[Decode, bytes]] = [
    *((decode_request, encode(request)) for request in (*REQUESTS, *ASKS)),
    (decode_answers, encode(ANSWERS)),
    *((decode_reply, encode(reply)) for reply in REPLIES),
    (decode_worker, encode(make_worker())),
]

TEXTS: list[object] = [..., None, "", 7, b"x", ["x"], "x" * 513, "a\nb"]
SIZES: list[object] = [0, -1, 1.5, "1", None, True, 2**64 - 1]
HEX: list[object] = [..., None, "", "a" * 31, "A" * 32, "a" * 32 + "\n", 7]


def test_the_bytes_of_a_hello_are_these() -> None:
    """Engines of two versions meet on these bytes; a change needs a new `CHANNEL_VERSION`."""
    fields = b"\xa4type\xa5hello\xa7version\x03\xa9engine_id\xa9prefill-0\xa9client_id\xa8decode-3"
    rest = b"\xafqueries_prompts\xc2\xa8connects\xc2\xa2at\xc0"
    assert encode(HELLO) == b"\x87" + fields + rest
    assert decode_request(b"\x85" + fields + b"\xafqueries_prompts\xc2") == HELLO, (
        "without `connects` and `at`"
    )
    assert decode_request(b"\x84" + fields) == HELLO, (
        "that of an engine without queries"
    )


def test_the_bytes_of_a_renewal_and_a_release_are_these() -> None:
    lease = b"\x82\xa4slot\x07\xa5epoch\xaf" + EPOCH.encode()
    body = b"\xa4boot\xd9\x20" + BOOT.encode() + b"\xa6leases\x91" + lease
    assert (
        encode(Renew(boot=BOOT, leases=LEASES[:1])) == b"\x83\xa4type\xa5renew" + body
    )
    assert (
        encode(Release(boot=BOOT, leases=LEASES[:1]))
        == b"\x83\xa4type\xa7release" + body
    )


def test_unknown_fields_are_ignored_at_every_level() -> None:
    def extended(value: Any) -> Any:
        if isinstance(value, dict):
            inner = {
                key: extended(inner) if key != "params" else inner
                for key, inner in value.items()
            }
            return {"before": [{}], **inner, "after": 2**63}
        if isinstance(value, list):
            return [extended(inner) for inner in value]
        return value

    for decode, frame in DECODERS:
        assert decode(encode_plain(extended(decode_plain(frame)))) == decode(frame)


def test_missing_fields_with_defaults_are_filled() -> None:
    hello = decode_plain(encode(HELLO))
    del hello["version"]
    assert decode_request(encode_plain(hello)) == HELLO
    engine = decode_plain(encode(make_description()))
    del engine["version"], engine["facts"]["speculative"], engine["topology"]["pcp"]
    del engine["groups"][0]["window_tokens"], engine["workers"][0]["place"]["dcp"]
    read = decode_reply(encode_plain(engine))
    assert isinstance(read, EngineDescription)
    assert (read.version, read.facts.speculative, read.topology.pcp) == (
        CHANNEL_VERSION,
        "none",
        1,
    )
    assert (read.groups[0].window_tokens, read.workers[0].place.dcp) == (0, 0)


def test_a_hello_of_another_version_is_understood_so_that_it_can_be_refused_by_name() -> (
    None
):
    later = msgspec.structs.replace(HELLO, version=CHANNEL_VERSION + 1)
    assert decode_request(encode(later)) == later
    second = b"\x83\xa4type\xa5hello\xa7version\x02\xa9engine_id\xa9prefill-0"
    hello = decode_request(second)
    assert isinstance(hello, Hello)
    assert hello.version == 2, "whose client has another field for its name"


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_of_another_version_is_refused_by_its_version(
    reply: EngineDescription | Refused,
) -> None:
    error = refused(
        decode_reply,
        encode(msgspec.structs.replace(reply, version=CHANNEL_VERSION + 1)),
    )
    assert error.field == "version"


@pytest.mark.parametrize(("decode", "valid"), DECODERS)
def test_hostile_frames_are_invalid_messages(decode: Decode, valid: bytes) -> None:
    for _, frame in hostile_frames(valid):
        refused(decode, frame)


WRONG_REQUEST: dict[str, list[object]] = {
    "boot": HEX,
    "leases": [..., None, [], {}, "x", [7], [None]],
    "leases.0.slot": [..., None, -1, 2**24, 1.5, "7", True],
    "leases.0.epoch": [..., None, "", "0" * 15, "f" * 16, "F" * 15, "f" * 15 + "\n", 7],
}
WRONG_ASK: dict[str, list[object]] = {
    "client_id": TEXTS,
    "queries": [..., None, [], {}, "x", [7], [None]],
    "queries.1.number": [..., None, -1, 2**53, 1.5, "7", True],
    "queries.1.key": [..., None, "", 7, "x" * 257, "a\nb", "a\n", "\N{SNOWMAN}"],
    "queries.1.num_tokens": [..., *SIZES],
    "queries.1.digest": HEX,
}
WRONG_PREFIX_ASK: dict[str, list[object]] = {
    "client_id": TEXTS,
    "queries": [..., None, [], {}, "x", [7], [None]],
    "queries.1.number": [..., None, -1, 2**53, 1.5, "7", True],
    "queries.1.chain": [
        ...,
        None,
        b"",
        b"x" * 15,
        b"x" * (2**16 + 16),
        7,
        "\N{SNOWMAN}",
    ],
    "queries.1.min_tokens": SIZES,
}
WRONG_ANSWERS: dict[str, list[object]] = {
    "answers": [..., None, {}, "x", [7], [None]],
    "answers.0.number": [..., None, -1, 2**53, 1.5, "7", True],
    "answers.0.progress": [..., None, "", "Ticket", 7, []],
    "answers.1.reason": [None, 7, "x" * 65, "No", "a\nb", "a\n"],
    "siblings": [None, {}, 5601, [0], [65536], ["5601"], [5601] * 1025],
}
WRONG_ENGINE: dict[str, list[object]] = {
    "version": SIZES,
    "engine_id": TEXTS,
    "boot": HEX,
    "mac_key": [..., None, b"", b"x" * 31, b"x" * 33, 7],
    "facts": [..., None, [], {}],
    "facts.model": TEXTS,
    "facts.max_model_tokens": [..., *SIZES],
    "topology": [..., None, []],
    "topology.tp": [*SIZES, 65537],
    "groups": [..., None, [], {}, [{}], [7]],
    "groups.0.block_tokens": [..., *SIZES],
    "groups.0.window_tokens": [-1, 1.5, None, 2**40],
    "workers": [..., None, [], {}, [{}], [7]],
    "workers.0.place.tp": [-1, 65536, None, "0"],
    "workers.0.agent_metadata": [..., None, b"", 7, b"x" * (2**20 + 1)],
    "workers.0.device": [..., None, -1, 2**16],
    "workers.0.lease_table": [..., None, {}, []],
    "workers.0.lease_table.address": [..., None, -1, 2**63, 1.5],
    "workers.0.lease_table.slots": [..., None, 0, 2**24],
    "workers.0.shared": [[], 7, {}],
    "workers.0.shared.machine": TEXTS,
    "workers.0.shared.pid_namespace": TEXTS,
    "workers.0.shared.pid": [..., None, 0, -1, 2**31],
    "workers.0.shared.allocations": [None, {}, [{}]],
    "workers.0.shared.allocations.0.address": [..., None, -1, 2**63],
    "workers.0.shared.allocations.0.num_bytes": [..., *SIZES],
    "workers.0.shared.allocations.0.fd": [..., None, -1, 2**31],
    "workers.0.shared.allocations.0.name": HEX,
    "workers.0.shared.device_allocations": [None, {}, [{}]],
    "workers.0.shared.device_allocations.0.address": [..., None, -1, 2**63],
    "workers.0.shared.device_allocations.0.num_bytes": [..., *SIZES],
    "workers.0.shared.device_allocations.0.offset": [..., None, -1, 2**63],
    "workers.0.shared.device_allocations.0.allocation_bytes": [..., *SIZES],
    "workers.0.shared.device_allocations.0.handle": [..., None, b"", b"x" * 63, 7],
    "workers.0.shared.device_allocations.0.generation": [..., None, -1, 2**63],
    "workers.0.shared.device_allocations.0.device": HEX,
    "workers.0.shared.device_proof": [{}, [], 7],
    "workers.0.tensors": [..., None, {}, [{}]],
    "workers.0.tensors.0.base": [..., None, -1, 2**63],
    "workers.0.tensors.0.blocks": [..., *SIZES],
    "workers.0.tensors.0.block_stride": [..., None, -1, 2**48],
    "workers.0.tensors.0.heads": [
        ...,
        None,
        [],
        [1],
        {},
        [-1, 2],
        ["0", 2],
        [0, 2**40 + 1],
    ],
    "workers.0.tensors.0.cell_bytes": [..., *SIZES],
    "workers.0.tensors.0.format": [..., None, [], {}],
}


@pytest.mark.parametrize(
    ("decode", "valid", "wrong"),
    [
        (
            decode_request,
            encode(HELLO),
            {"version": SIZES, "engine_id": TEXTS, "client_id": TEXTS[1:]},
        ),
        (decode_request, encode(REQUESTS[1]), WRONG_REQUEST),
        (decode_request, encode(REQUESTS[2]), WRONG_REQUEST),
        (decode_request, encode(ASKS[0]), WRONG_ASK),
        (
            decode_request,
            encode(ASKS[1]),
            {"client_id": TEXTS, "numbers": [..., None, [], [-1], ["5"], [1] * 257]},
        ),
        (decode_request, encode(ASKS[2]), WRONG_PREFIX_ASK),
        (decode_answers, encode(ANSWERS), WRONG_ANSWERS),
        (decode_reply, encode(make_description()), WRONG_ENGINE),
        (
            decode_reply,
            encode(REPLIES[1]),
            {"field": TEXTS, "value": [..., None, 7, "x" * 513]},
        ),
    ],
)
def test_every_wrong_value_is_refused_by_the_name_of_its_field(
    decode: Decode, valid: bytes, wrong: dict[str, list[object]]
) -> None:
    for path, frame in wrong_values(valid, wrong):
        error = refused(decode, frame)
        assert re.sub(r"\[(\d+)\]", r".\1", error.field).startswith(path), (
            path,
            str(error),
        )


def test_the_largest_allowed_renewal_fits_into_a_request() -> None:
    lease = LeaseName(slot=2**24 - 1, epoch="f" * 15)
    renew = Renew(boot=BOOT, leases=(lease,) * MAX_RENEWALS)
    assert len(encode(renew)) <= MAX_REQUEST_BYTES
    assert decode_request(encode(renew)) == renew
    for kind in (Renew, Release):
        error = refused(
            decode_request,
            encode(kind(boot=BOOT, leases=(lease,) * (MAX_RENEWALS + 1))),
        )
        assert error.field == "leases"


def test_a_memory_bomb_is_refused_without_its_memory() -> None:
    """Small frames that claim billions of leases; the test would not survive their allocation."""
    head = b"\x83\xa4type\xa5renew\xa4boot\xd9\x20" + BOOT.encode() + b"\xa6leases"
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdc\x10\x00", b"\xdd\x00\x00\x10\x00"):
        refused(decode_request, head + claim)


def test_the_fields_of_a_description_are_these() -> None:
    plain = decode_plain(encode(make_description()))
    assert list(plain) == [
        "type",
        "version",
        "engine_id",
        "boot",
        "mac_key",
        "facts",
        "topology",
        "groups",
        "workers",
        "generation",
    ]
    assert plain["type"] == "engine"
    assert list(plain["workers"][0]) == [
        *(
            "place",
            "agent",
            "agent_metadata",
            "memory",
            "device",
            "lease_table",
            "tensors",
            "stream_rows",
            "shared",
        ),
    ]
    tensor = plain["workers"][0]["tensors"][0]
    assert tensor == msgspec.to_builtins(make_tensor())
    assert tensor["heads"] == [2, 4]


@pytest.mark.parametrize("spare", [0, 1, MAX_PART_BYTES - 1, MAX_PART_BYTES])
def test_a_description_that_comes_in_parts_is_the_whole_one(spare: int) -> None:
    whole = encode(make_description()).ljust(2 * MAX_PART_BYTES + spare, b"x")
    sent, received = PartsSent(whole), PartsReceived()
    parts = [sent.answer(at) for at in range(0, len(whole), MAX_PART_BYTES)]
    assert all(len(part) <= MAX_PART_FRAME_BYTES for part in parts)
    assert [received.take(part) for part in parts] == [
        *[None] * (len(parts) - 1),
        whole,
    ]
    assert sent.answer(None) == whole, "who does not ask for parts gets all of it"


def test_a_short_description_is_one_answer() -> None:
    whole = encode(make_description())
    assert PartsSent(whole).answer(0) == whole
    assert PartsReceived().take(whole) == whole
    assert PartsReceived().take(encode(REPLIES[1])) == encode(REPLIES[1])


def test_a_part_that_is_not_the_next_one_of_the_same_description_is_refused() -> None:
    whole, other = (bytes([byte]) * (2 * MAX_PART_BYTES + 5) for byte in b"xy")
    sent = PartsSent(whole)
    first, second, third = (
        sent.answer(at) for at in range(0, len(whole), MAX_PART_BYTES)
    )
    fields = msgspec.msgpack.decode(second)
    wrong = {
        "the first again": first,
        "a later one": third,
        "one of another description": PartsSent(other).answer(MAX_PART_BYTES),
        "a short one": msgspec.msgpack.encode(fields | {"data": b"x"}),
        "one of another length": msgspec.msgpack.encode(
            fields | {"total_bytes": len(whole) + 1}
        ),
        "a whole description": encode(make_description()),
        "a request": encode(HELLO),
    }
    for frame in wrong.values():
        received = PartsReceived()
        assert received.take(first) is None
        with pytest.raises(InvalidMessage):
            received.take(frame)
    received = PartsReceived()
    for part in (first, second):
        assert received.take(part) is None
    changed = msgspec.msgpack.encode(msgspec.msgpack.decode(third) | {"data": b"zzzzz"})
    with pytest.raises(InvalidMessage, match="the digest of what has come"):
        received.take(changed)
    with pytest.raises(InvalidMessage, match="at"):
        sent.answer(len(whole))
