"""Queries for prefixes: their bytes, their bounds, and how many fit into a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.digests import DIGEST_BYTES, Prompt, digest_chain
from kvferry.protocol.handshake import MAX_REQUEST_BYTES, decode_request, encode
from kvferry.protocol.queries import (
    MAX_CHAIN_BYTES,
    MAX_CHAINS_BYTES,
    MAX_QUERIES,
    FindPrefixes,
    PrefixQuery,
    chain_bytes,
    prefix_messages,
)
from tests.protocol.frames import decode_plain, encode_plain, refused


def query(number: int, digests: int = 1) -> PrefixQuery:
    return PrefixQuery(number=number, chain=bytes(DIGEST_BYTES) * digests)


def test_the_bytes_of_a_prefix_query_are_these() -> None:
    chain = bytes(range(16))
    found = FindPrefixes(
        client_id="decode-3",
        queries=(PrefixQuery(number=7, chain=chain, min_tokens=512),),
    )
    head = b"\x83\xa4type\xadfind_prefixes\xa9client_id\xa8decode-3\xa7queries\x91"
    body = (
        b"\x83\xa6number\x07\xa5chain\xc4\x10" + chain + b"\xaamin_tokens\xcd\x02\x00"
    )
    assert encode(found) == head + body
    without = body.replace(b"\x83", b"\x82", 1).partition(b"\xaamin_tokens")[0]
    asked = decode_request(head + without)
    assert isinstance(asked, FindPrefixes)
    assert asked.queries[0].min_tokens == 1


def test_a_chain_is_that_of_the_prompts_digests() -> None:
    prompt = Prompt(tokens=range(600), salt="s")
    chain = chain_bytes(digest_chain(prompt, 512))
    first, second = digest_chain(prompt, 512)
    assert chain == bytes.fromhex(first) + bytes.fromhex(second)


@pytest.mark.parametrize("length", [17, 31, MAX_CHAIN_BYTES - 1])
def test_a_chain_of_broken_digests_is_refused(length: int) -> None:
    plain = decode_plain(
        encode(FindPrefixes(client_id="d", queries=(query(1), query(2))))
    )
    plain["queries"][1]["chain"] = bytes(length)
    error = refused(decode_request, encode_plain(plain))
    assert error.field == "queries[1]"
    assert f"`chain` of {length} bytes" in str(error)
    with pytest.raises(ValueError, match="chain"):
        PrefixQuery(number=1, chain=bytes(length))


def test_a_message_with_chains_that_are_too_long_together_is_refused() -> None:
    longest = MAX_CHAIN_BYTES // DIGEST_BYTES
    most = FindPrefixes(client_id="d", queries=(query(1, longest), query(2, longest)))
    assert decode_request(encode(most)) == most
    plain = decode_plain(encode(most))
    plain["queries"].append({"number": 3, "chain": bytes(DIGEST_BYTES)})
    error = refused(decode_request, encode_plain(plain))
    assert f"at most {MAX_CHAINS_BYTES}" in str(error)


@given(st.lists(st.integers(1, MAX_CHAIN_BYTES // DIGEST_BYTES), max_size=600))
def test_queries_of_any_number_and_length_fit_into_messages(
    lengths: list[int],
) -> None:
    queries = [query(number, digests) for number, digests in enumerate(lengths)]
    sent = list(prefix_messages("d" * 512, queries))
    assert [one for message in sent for one in message.queries] == queries
    assert all(len(message.queries) <= MAX_QUERIES for message in sent)
    for message in sent:
        frame = encode(message)
        assert len(frame) <= MAX_REQUEST_BYTES
        assert decode_request(frame) == message
