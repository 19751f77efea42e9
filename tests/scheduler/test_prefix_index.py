"""Chunks by their digests, against a model that keeps every sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.digests import CHUNK_TOKENS, DIGEST_BYTES, Prompt, digest_chain
from kvferry.protocol.queries import chain_bytes
from kvferry.scheduler.producer.prefix_directory import (
    ListedChunk,
    ListedSequence,
    PrefixIndex,
    ProvenPrefix,
    list_sequence,
)

CONTENTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
"""A sequence by the contents of its chunks."""
HASH_TOKENS = st.sampled_from([16, 32, 128, 256, 48, 80, 400, 784])


def tokens_of(contents: Sequence[int], more: int = 0) -> list[int]:
    whole = [content for content in contents for _ in range(CHUNK_TOKENS)]
    return whole + [9] * more


def hashes_of(tokens: Sequence[int], hash_tokens: int) -> list[bytes]:
    """Stand-ins of vLLM's hashes: each tells the tokens before it and its end."""
    ends = range(hash_tokens, len(tokens) + 1, hash_tokens)
    return [repr(tokens[: end : CHUNK_TOKENS // 16]).encode() for end in ends]


def listed(
    index: PrefixIndex, contents: Sequence[int], hash_tokens: int, more: int = 0
) -> ListedSequence:
    tokens = tokens_of(contents, more)
    sequence = ListedSequence(
        Prompt(tokens=tokens), hashes_of(tokens, hash_tokens), len(tokens), 0
    )
    list_sequence(index, sequence, hash_tokens, hash_tokens, lambda: None)
    return sequence


def chain_of(contents: Sequence[int], **prompt: str) -> bytes:
    tokens = tokens_of(contents)
    return chain_bytes(digest_chain(Prompt(tokens=tokens, **prompt)))  # type: ignore[arg-type]


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@given(st.lists(CONTENTS, max_size=6), CONTENTS, HASH_TOKENS, st.integers(0, 255))
def test_a_chain_finds_what_its_prompt_shares_with_any_sequence(
    sequences: list[list[int]], asked: list[int], hash_tokens: int, more: int
) -> None:
    index = PrefixIndex(1000)
    for contents in sequences:
        listed(index, contents, hash_tokens, more)
    proven = ProvenPrefix(chain_of(asked), index.leading(chain_of(asked)))
    longest = max((shared(asked, contents) for contents in sequences), default=0)
    assert proven.num_tokens == longest * CHUNK_TOKENS
    tokens = tokens_of(asked)[: proven.num_tokens]
    assert proven.hashes == hashes_of(tokens, hash_tokens)


@given(CONTENTS, HASH_TOKENS, st.data())
def test_a_hit_of_any_length_has_the_digests_of_its_tokens(
    contents: list[int], hash_tokens: int, data: st.DataObject
) -> None:
    index = PrefixIndex(1000)
    listed(index, contents, hash_tokens)
    proven = ProvenPrefix(chain_of(contents), index.leading(chain_of(contents)))
    hits = [*range(hash_tokens, proven.num_tokens + 1, hash_tokens)]
    length = data.draw(st.sampled_from(hits)) if hits else 0
    if not length:
        return
    digests = proven.digests(length)
    expected = digest_chain(Prompt(tokens=tokens_of(contents)), length)
    if digests is None:
        # Only where hits may end with a chunk, too.
        assert CHUNK_TOKENS % hash_tokens == 0
        assert proven.shorter(length) == length // CHUNK_TOKENS * CHUNK_TOKENS
    else:
        assert digests == expected
        assert proven.shorter(length) == length


@given(CONTENTS, st.lists(st.integers(0, 1200), min_size=1, max_size=5))
def test_a_sequence_is_listed_as_it_grows_and_each_chunk_once(
    contents: list[int], lengths: list[int]
) -> None:
    tokens = tokens_of(contents, 100)
    sequence = ListedSequence(Prompt(tokens=tokens), hashes_of(tokens, 16), 0, 0)
    index = PrefixIndex(1000)
    made: list[int] = []
    for length in sorted(lengths):
        sequence.num_tokens = min(length, len(tokens))
        list_sequence(index, sequence, 16, 16, lambda: made.append(1))
        whole = sequence.num_tokens // CHUNK_TOKENS
        assert sequence.num_listed == whole * CHUNK_TOKENS
        assert len(index.leading(chain_of(contents))) == min(whole, len(contents))
        assert len(made) == whole


@pytest.mark.parametrize("field", ["salt", "lora", "weights"])
def test_who_lacks_what_else_determines_a_cache_finds_nothing(field: str) -> None:
    index = PrefixIndex(1000)
    tokens = tokens_of([1, 2])
    prompt = Prompt(tokens=tokens, **{field: "x"})  # type: ignore[arg-type]
    sequence = ListedSequence(prompt, hashes_of(tokens, 16), len(tokens), 0)
    list_sequence(index, sequence, 16, 16, lambda: None)
    assert len(index.leading(chain_of([1, 2], **{field: "x"}))) == 2
    assert not index.leading(chain_of([1, 2], **{field: "y"}))
    assert not index.leading(chain_of([1, 2]))


def test_the_oldest_chunks_are_forgotten_and_the_last_of_a_sequence_first() -> None:
    index = PrefixIndex(4)
    listed(index, [0, 1], 16)
    listed(index, [2, 1], 16)
    assert len(index.leading(chain_of([0, 1]))) == 2, "used: now the newer one"
    listed(index, [1], 16)
    assert len(index) == 4
    assert len(index.leading(chain_of([2, 1]))) == 1
    assert len(index.leading(chain_of([0, 1]))) == 2


def test_a_chunk_that_is_listed_again_has_the_newest_hashes() -> None:
    index = PrefixIndex(4)
    digest = bytes(DIGEST_BYTES)
    index.add(digest, ListedChunk((b"old",)))
    index.add(digest, ListedChunk((b"new",)))
    assert index.leading(digest) == [ListedChunk((b"new",))]
    index.clear()
    assert not len(index)


def test_a_chunk_is_listed_when_all_of_its_blocks_have_hashes() -> None:
    """Without one, every hash after it would be that of the block before."""
    contents = (0, 1, 2)
    tokens = tokens_of(contents)
    hashes = hashes_of(tokens, 16)
    known = hashes[:31]
    index = PrefixIndex(9)
    sequence = ListedSequence(Prompt(tokens=tokens), known, len(tokens), 0)
    chain = chain_of(contents)
    for expected in (hashes[:16], hashes):
        list_sequence(index, sequence, 16, 16, lambda: None)
        proven = ProvenPrefix(chain, index.leading(chain))
        assert proven.hashes == expected
        known.extend(hashes[31:])
