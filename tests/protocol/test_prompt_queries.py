"""What both legs of a request have in common, and engine ids that announce more than a name."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidMessage, InvalidParams
from kvferry.protocol.handshake import (
    MAX_REQUEST_BYTES,
    Refused,
    decode_request,
    encode,
)
from kvferry.protocol.ids import BootId, Text
from kvferry.protocol.params import (
    announced_id,
    boot_of,
    decode_params,
    engine_of,
    request_key,
    request_name,
)
from kvferry.protocol.queries import (
    Answer,
    Answers,
    PromptProgress,
    PromptQuery,
    Subscribe,
    answers_in,
    decode_answers,
)
from tests.protocol.samples import make_params, make_ticket

BOOT = BootId("0123456789abcdef" * 2)


def frame_of(params: bytes) -> bytes:
    """A frame with the ticket of one question, whose params are these bytes."""
    answer = Answer(
        number=1, progress=PromptProgress.TICKET, params=msgspec.Raw(params)
    )
    return encode(Answers(answers=(answer,)))


EMPTY_CONTAINERS = {
    "lists": b"\xdd\x00\x7f\x00\x00" + b"\x90" * (0x7F0000),
    "maps": b"\xdd\x00\x7f\x00\x00" + b"\x80" * (0x7F0000),
    "lists in a map": b"\x81\xa6params\xdd\x00\x7f\x00\x00" + b"\x90" * (0x7F0000),
}


@pytest.mark.parametrize("params", EMPTY_CONTAINERS.values(), ids=EMPTY_CONTAINERS)
def test_params_of_millions_of_empty_containers_are_not_made_into_objects(
    params: bytes,
) -> None:
    """They hold the interpreter's lock while they are. As plain objects 16 MiB took 3 to 8 s and 1.2 GB."""
    frame = frame_of(params)
    tracemalloc.start()
    try:
        (answer,) = decode_answers(frame).answers
        with pytest.raises(InvalidParams):
            decode_params(answer.params)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(frame)
    finally:
        tracemalloc.stop()


def test_answers_are_told_from_other_messages_and_wrong_ones_are_refused() -> None:
    right = Answers(answers=(Answer(number=1, progress=PromptProgress.QUEUED),))
    assert answers_in(encode(right)) == right
    assert answers_in(encode(Refused(field="boot", value="a", expected="b"))) is None
    unknown_to_this_version = msgspec.msgpack.encode({"type": "news", "answers": 1})
    assert answers_in(unknown_to_this_version) is None
    with pytest.raises(InvalidMessage) as wrong:
        answers_in(msgspec.msgpack.encode({"answers": 1, "type": "answers"}))
    assert wrong.value.field == "answers"
    for frame in (b"", b"\xc1", b"\x80", encode(right)[:-1]):
        with pytest.raises(InvalidMessage):
            answers_in(frame)


def test_a_ticket_comes_as_it_was_given() -> None:
    params = make_params()
    (answer,) = decode_answers(frame_of(msgspec.msgpack.encode(params))).answers
    assert decode_params(answer.params) == params
    (plain,) = decode_answers(
        frame_of(msgspec.msgpack.encode(params.to_json()))
    ).answers
    assert decode_params(plain.params) == params, (
        "as an engine of an older version sends it"
    )


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (b"\xc0", "message"),
        (b"\x80", "remote_engine_id"),
        (b"\x91" * 100_000 + b"\xc0", "message"),
        (
            msgspec.msgpack.encode(
                make_params().to_json() | {"remote_block_ids": [[0.0]]}
            ),
            "remote_block_ids",
        ),
        (
            msgspec.msgpack.encode(make_params(ticket=make_ticket(version=2))),
            "kvferry.version",
        ),
        (
            msgspec.msgpack.encode(
                make_params(ticket=make_ticket(digests=("a" * 32,) * 3))
            ),
            "kvferry.digests",
        ),
    ],
)
def test_wrong_params_of_an_answer_are_refused_by_the_name_of_their_field(
    params: bytes, field: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        decode_params(msgspec.Raw(params))
    assert refused.value.field.startswith(field)


@pytest.mark.parametrize(
    ("prefill", "decode", "equal"),
    [
        ("cmpl-x-0-0123abcd", "cmpl-x-0-89abcdef", True),
        ("chatcmpl-x-0123abcd", "chatcmpl-x-89abcdef", True),
        ("cmpl-x-0-0123abcd", "cmpl-x-1-89abcdef", False),
        ("0_cmpl-x-0-0123abcd", "1_cmpl-x-0-89abcdef", False),
        ("1_chatcmpl-x-0123abcd", "1_chatcmpl-x-89abcdef", True),
        ("cmpl-x-0", "cmpl-x-0", True),
        ("cmpl-x-0123ABCD", "cmpl-x-89ABCDEF", False),
    ],
)
def test_legs_are_matched_by_their_ids_without_vllms_random_end(
    prefill: str, decode: str, equal: bool
) -> None:
    assert (request_key(prefill) == request_key(decode)) is equal


@pytest.mark.parametrize(
    ("prefill", "decode", "equal"),
    [
        ("cmpl-a-0-0123abcd", "cmpl-b-0-89abcdef", True),
        ("cmpl-a-0-0123abcd", "cmpl-b-1-89abcdef", False),
        ("0_cmpl-a-0-0123abcd", "1_cmpl-b-0-89abcdef", False),
        ("chatcmpl-a-0123abcd", "chatcmpl-b-89abcdef", True),
    ],
)
def test_with_a_transfer_id_only_the_index_in_a_batch_or_of_n_counts(
    prefill: str, decode: str, equal: bool
) -> None:
    assert (request_key(prefill, "t") == request_key(decode, "t")) is equal
    assert request_key(prefill, "t") != request_key(prefill, "u")


@given(st.text(max_size=600), st.none() | st.text(max_size=600))
def test_a_key_of_any_id_can_be_asked_for(
    request_id: str, transfer_id: str | None
) -> None:
    key = request_key(request_id, transfer_id)
    query = PromptQuery(number=1, key=key, num_tokens=5, digest="0" * 32)
    frame = encode(Subscribe(client_id="d", queries=(query,) * 256))
    asked = decode_request(frame)
    assert isinstance(asked, Subscribe)
    assert asked.queries[0] == query
    assert len(frame) < MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    ("request_id", "is_kept"),
    [
        ("cmpl-ü-0", True),
        (512 * "x", True),
        (513 * "x", False),
        ("line\nbreak", False),
        ("\ud800", False),
        ("", False),
    ],
)
def test_the_name_of_a_request_is_its_id_or_a_digest_that_params_may_have(
    request_id: str, is_kept: bool
) -> None:
    name = request_name(request_id)
    assert (name == request_id) is is_kept
    assert msgspec.convert(name, Text) == name
    assert name != request_name(request_id + "y")


@pytest.mark.parametrize(
    "engine_id", ["prefill-0", "a.b.c", "kvferry1.x", "ü", f"kvferry1.{BOOT}.nested"]
)
def test_an_announced_id_gives_back_engine_and_boot(engine_id: str) -> None:
    announced = announced_id(BOOT, engine_id)
    assert (engine_of(announced), boot_of(announced)) == (engine_id, BOOT)


@pytest.mark.parametrize(
    "engine_id",
    [
        "",
        "stock",
        "kvferry1",
        f"kvferry1.{BOOT}",
        f"kvferry1.{BOOT}.",
        "kvferry1.abc.x",
    ],
)
def test_other_ids_announce_nothing(engine_id: str) -> None:
    assert (engine_of(engine_id), boot_of(engine_id)) == (engine_id, None)
