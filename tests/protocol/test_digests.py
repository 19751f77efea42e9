"""The digest chain: golden vectors, an independent reading of its definition, and what it must tell apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol import digests
from kvferry.protocol.digests import (
    GrowingChain,
    Media,
    Prompt,
    UncoveredToken,
    digest_chain,
    shared_tokens,
)

GOLDEN: dict[str, tuple[Prompt, tuple[str, ...]]] = {
    "one token": (Prompt([0]), ("05e26e3217c991d575fa665cab550ebb",)),
    "a chunk": (Prompt(range(256)), ("73a1e7b23976225ab9921d8a34e0d7d8",)),
    "a chunk and one": (
        Prompt(range(257)),
        ("73a1e7b23976225ab9921d8a34e0d7d8", "2292421c25a15da1b0ad3dc74ea882f6"),
    ),
    "large ids": (
        Prompt([2**32 - 1, 0, 128000]),
        ("a99617f5fbaf748c7e66a8f2197fb322",),
    ),
    "adapter and salt": (
        Prompt(range(300), lora="sql-expert", salt="tenant-é"),
        ("762c09b9471bde72fc671bdcb427370f", "4966bdf3866b0e64139a2631d0d6e9f9"),
    ),
    "updated weights": (
        Prompt(range(3), weights="step-7"),
        ("97640809885ab0b478bbfaef1ffe9a51",),
    ),
    "media across a border": (
        Prompt(range(600), media=(Media(250, 10, "cafe"), Media(500, 20, "f00d"))),
        (
            "041467fcbd72fe6ffd71ca0b89986a11",
            "7b3ebb52a743668c30a5342df7dc4d23",
            "0c19775773edf2914fc06dd9e7d12922",
        ),
    ),
}


def le64(number: int) -> bytes:
    return bytes((number >> shift) & 0xFF for shift in range(0, 64, 8))


def framed_hash(*parts: bytes) -> bytes:
    framed = b"".join(le64(len(part)) + part for part in parts)
    return hashlib.blake2b(framed, digest_size=16, person=b"kvferry-digest-1").digest()


def slow_chain(prompt: Prompt) -> list[str]:
    """The definition in the module's docstring, read literally and token by token."""
    lora, salt = (
        b"" if text is None else b"=" + text.encode()
        for text in (prompt.lora, prompt.salt)
    )
    weights = [b"=" + prompt.weights.encode()] if prompt.weights else []
    digest = framed_hash(b"identity", lora, salt, *weights)
    chain = []
    for start in range(0, len(prompt.tokens), 256):
        stop = min(start + 256, len(prompt.tokens))
        media = b""
        for item in prompt.media:
            if set(range(start, stop)) & set(
                range(item.offset, item.offset + item.length)
            ):
                content = item.content.encode()
                media += (
                    le64(item.offset) + le64(item.length) + le64(len(content)) + content
                )
        tokens = b"".join(le64(token)[:4] for token in prompt.tokens[start:stop])
        digest = framed_hash(b"chunk", digest, media, tokens)
        chain.append(digest.hex())
    return chain


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(
    lambda head: head * 20
) | st.lists(st.integers(0, 3), max_size=600)
NAMES = st.none() | st.text(max_size=6)
MEDIA = st.lists(
    st.builds(Media, st.integers(0, 600), st.integers(1, 300), st.text(max_size=4)),
    max_size=3,
).map(tuple)
PROMPTS = st.builds(Prompt, TOKENS, NAMES, NAMES, MEDIA, st.text(max_size=4))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    """Two versions of kvferry must agree on these; a change needs a new personalisation and `PARAMS_VERSION`."""
    prompt, expected = GOLDEN[name]
    assert digest_chain(prompt) == expected


@given(PROMPTS)
@example(
    Prompt(
        range(600),
        media=(Media(200, 56, "ends at a border"), Media(512, 3, "starts at one")),
    )
)
@example(
    Prompt(
        range(600), media=(Media(0, 600, "covers all"), Media(600, 9, "after the end"))
    )
)
def test_the_chain_is_what_its_docstring_says(prompt: Prompt) -> None:
    assert list(digest_chain(prompt)) == slow_chain(prompt)


@given(PROMPTS, st.data())
def test_a_prefix_is_digested_as_if_the_rest_were_not_there(
    prompt: Prompt, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(prompt.tokens)))
    prefix = replace(prompt, tokens=prompt.tokens[:count])
    assert digest_chain(prompt, count) == digest_chain(prefix)


@given(PROMPTS, st.data())
def test_a_chain_that_grows_is_the_same(prompt: Prompt, data: st.DataObject) -> None:
    counts = sorted(data.draw(st.lists(st.integers(0, len(prompt.tokens)), max_size=4)))
    grown = GrowingChain(prompt)
    for count in counts:
        grown.grow(count)
    assert grown.digests(len(prompt.tokens)) == digest_chain(prompt)
    with pytest.raises(ValueError, match="num_tokens"):
        grown.digests(len(prompt.tokens) + 1)


@given(PROMPTS, st.data())
def test_a_chain_goes_on_from_what_is_known_of_a_longer_prompt(
    prompt: Prompt, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(prompt.tokens)))
    shorter = GrowingChain(replace(prompt, tokens=prompt.tokens[:count]))
    shorter.grow(data.draw(st.integers(0, count)))
    shorter.adopt(digest_chain(prompt), count)
    assert shorter.digests(count) == digest_chain(prompt, count)


def test_tokens_that_a_chain_has_grown_over_are_not_digested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[int] = []
    as_uint32, chain = digests._as_uint32, GrowingChain(Prompt(range(1000)))

    def counting(tokens: Any) -> Any:
        digested.append(len(tokens))
        return as_uint32(tokens)

    monkeypatch.setattr(digests, "_as_uint32", counting)
    for num_tokens in (600, 900):
        chain.grow(num_tokens)
    chain.digests(1000)
    assert digested == [512, 256, 232]


@pytest.mark.parametrize("token", [-1, 2**32, 2**63, 2**64, -(2**64)])
def test_a_token_id_that_is_no_uint32_is_a_value_error(token: int) -> None:
    with pytest.raises(UncoveredToken, match="token id"):
        digest_chain(Prompt([1, token]))


@pytest.mark.parametrize("count", [-1, 4])
def test_more_tokens_than_the_prompt_has_are_a_value_error(count: int) -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        digest_chain(Prompt([1, 2, 3]), count)


@given(PROMPTS, PROMPTS, st.data())
def test_a_chain_that_grows_shares_what_its_prompt_does(
    prompt: Prompt, other: Prompt, data: st.DataObject
) -> None:
    num_alike = data.draw(st.integers(0, min(len(prompt.tokens), len(other.tokens))))
    mixed = [*prompt.tokens[:num_alike], *other.tokens[num_alike:]]
    remote = replace(prompt, tokens=mixed)
    num_tokens = data.draw(st.integers(0, len(mixed)))
    chain = digest_chain(remote, num_tokens)
    grown = GrowingChain(prompt)
    grown.grow(data.draw(st.integers(0, len(prompt.tokens))))
    assert grown.shared_tokens(chain, num_tokens) == shared_tokens(
        prompt, chain, num_tokens
    )
    whole = digest_chain(prompt, grown.num_tokens)
    assert grown.encoded(grown.num_tokens).hex() == "".join(whole)


def model_of_shared_tokens(local: Prompt, remote: Prompt) -> int:
    """Longest boundary up to which everything that decides the cache is equal, compared value by value."""

    def decisive(prompt: Prompt, start: int, stop: int) -> object:
        media = [
            item
            for item in prompt.media
            if item.offset < stop and start < item.offset + item.length
        ]
        return list(prompt.tokens[start:stop]), media

    if (local.lora, local.salt) != (remote.lora, remote.salt):
        return 0
    shared = 0
    total = len(remote.tokens)
    for start in range(0, total, 256):
        stop = min(start + 256, total)
        if len(local.tokens) < stop or decisive(local, start, stop) != decisive(
            remote, start, stop
        ):
            break
        shared = stop
    return shared


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Prompt, Prompt]:
    """A prompt, and one that often shares a prefix with it."""
    remote = draw(
        st.builds(
            Prompt,
            st.lists(st.integers(0, 1), min_size=1, max_size=900),
            NAMES,
            NAMES,
            MEDIA,
        )
    )
    cut = draw(st.integers(0, len(remote.tokens)))
    tail = draw(st.lists(st.integers(0, 1), max_size=400))
    tokens = (
        [*remote.tokens[:cut], *tail]
        if draw(st.booleans())
        else [*remote.tokens, *tail]
    )
    identity = draw(
        st.sampled_from(
            [(remote.lora, remote.salt), (remote.lora, None), ("", remote.salt)]
        )
    )
    media = remote.media if draw(st.booleans()) else draw(MEDIA)
    return Prompt(tokens, *identity, media), remote


@given(pairs())
@example((Prompt([1] * 300 + [2] * 400), Prompt([1] * 700)))
@example((Prompt([1] * 255), Prompt([1] * 256)))
@example((Prompt([1] * 257), Prompt([1] * 256)))
def test_shared_tokens_agrees_with_a_comparison_value_by_value(
    pair: tuple[Prompt, Prompt],
) -> None:
    local, remote = pair
    assert shared_tokens(
        local, digest_chain(remote), len(remote.tokens)
    ) == model_of_shared_tokens(local, remote)


def different(prompts: Sequence[Prompt]) -> bool:
    """Whether no two of them share a single digest."""
    digests = [digest for prompt in prompts for digest in digest_chain(prompt)]
    return len(set(digests)) == len(digests)


def test_a_hostile_name_with_a_lone_surrogate_is_digested_too() -> None:
    assert different(
        [Prompt([1], lora="\ud800"), Prompt([1], lora="?"), Prompt([1], salt="\ud800")]
    )


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 511])
def test_a_chain_that_grew_beyond_a_ticket_is_compared_up_to_its_end(
    num_tokens: int,
) -> None:
    prompt = Prompt(list(range(600)))
    grown = GrowingChain(prompt)
    grown.grow(512)
    ticket = digest_chain(prompt, num_tokens)
    assert grown.shared_tokens(ticket, num_tokens) == num_tokens
    other = digest_chain(Prompt([*range(num_tokens - 1), 9999]), num_tokens)
    whole_chunks = (num_tokens - 1) // 256 * 256
    assert grown.shared_tokens(other, num_tokens) == whole_chunks
