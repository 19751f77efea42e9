"""The prompts and answers that this engine has computed, found by their digests. No I/O, no clock.

vLLM's prefix cache is found by vLLM's own block hashes, which depend on its hash seed, its block size and the names of
adapters. Another engine sends digests, which do not. So each chunk of 256 tokens that this engine has had is listed
under its digest, with vLLM's hashes of the blocks that end in it:

    tokens          0 … 255   256 … 511   512 … 767
    digests            d0          d1          d2        each depends on all tokens before
    block hashes    h0 … h15   h16 … h31   h32 … h47     with hash blocks of 16 tokens

That a chunk is listed does not say that its blocks are in the cache: they may have been reused, or not be computed yet.
vLLM's cache knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.protocol.digests import CHUNK_TOKENS, DIGEST_BYTES, GrowingChain, Prompt


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """One chunk of 256 tokens after all that came before it.

    Attributes:
        hashes: vLLM's hashes of the blocks that end within the chunk, in order; () where blocks are longer than it.
        parts: digests of the tokens up to a boundary within the chunk, by this number of tokens from the sequence's
            beginning. Only where prefix hits need not end with a chunk.
    """

    hashes: tuple[bytes, ...]
    parts: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True, eq=False)
class ListedSequence:
    """A request's tokens, to be listed.

    Attributes:
        prompt: the request's tokens and what else determines their cache; the list grows with the request.
        block_hashes: vLLM's list, which grows, too.
        num_tokens: how many tokens are to be listed, set by the engine's thread.
        generation: of the engine's cache when the request was admitted.
        chain: the digests that were made so far. Of the listener's thread.
    """

    prompt: Prompt
    block_hashes: Sequence[bytes]
    num_tokens: int
    generation: int
    chain: GrowingChain | None = None
    num_listed: int = 0


class PrefixIndex:
    """Chunks by digest; the one that was listed or found longest ago is forgotten first.

    Args:
        max_chunks: most chunks that are listed.
    """

    def __init__(self, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self._chunks: dict[bytes, ListedChunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, digest: bytes, chunk: ListedChunk) -> None:
        """List a chunk, in place of an earlier one of this digest."""
        # A later request may have other hashes for the same content: its adapter has another name.
        self._chunks.pop(digest, None)
        self._chunks[digest] = chunk
        if len(self._chunks) > self.max_chunks:
            del self._chunks[next(iter(self._chunks))]

    def leading(self, chain: bytes) -> list[ListedChunk]:
        """The listed chunks with the first digests of a chain, up to the first that is not listed."""
        found: list[ListedChunk] = []
        for at in range(0, len(chain), DIGEST_BYTES):
            digest = chain[at : at + DIGEST_BYTES]
            chunk = self._chunks.get(digest)
            if chunk is None:
                break
            found.append(chunk)
        # The first chunk is forgotten last: without it none of the others is found.
        self.touch(chain[: len(found) * DIGEST_BYTES])
        return found

    def touch(self, chain: bytes) -> None:
        """The chunks of this chain are forgotten after all others, the first of them last."""
        for at in range(len(chain) - DIGEST_BYTES, -1, -DIGEST_BYTES):
            digest = chain[at : at + DIGEST_BYTES]
            chunk = self._chunks.pop(digest, None)
            if chunk is not None:
                self._chunks[digest] = chunk

    def clear(self) -> None:
        """Forget all."""
        self._chunks.clear()


def list_sequence(
    index: PrefixIndex,
    sequence: ListedSequence,
    hash_tokens: int,
    hit_tokens: int,
    pause: Callable[[], None],
) -> None:
    """List the whole chunks of a sequence's first `num_tokens` tokens that were not listed before.

    Args:
        hash_tokens: tokens of a block of which vLLM makes a hash.
        hit_tokens: prefix hits end at multiples of it.
        pause: called after every chunk.

    Raises:
        ValueError: a token id outside [0, 2**32).
    """
    if sequence.chain is None:
        sequence.chain = GrowingChain(sequence.prompt)
    chain = sequence.chain
    listed = bytearray()
    for start in range(
        sequence.num_listed, sequence.num_tokens - CHUNK_TOKENS + 1, CHUNK_TOKENS
    ):
        stop = start + CHUNK_TOKENS
        if len(sequence.block_hashes) < stop // hash_tokens:
            # Listed without one, the hashes of later chunks would be taken for those of other blocks.
            break
        parts = tuple(
            (length, chain.last_digest(length))
            for length in _hits_within(start, stop, hit_tokens)
        )
        digest = bytes.fromhex(chain.last_digest(stop))
        hashes = sequence.block_hashes[start // hash_tokens : stop // hash_tokens]
        index.add(digest, ListedChunk(tuple(hashes), parts))
        listed += digest
        sequence.num_listed = stop
        pause()
    index.touch(bytes(listed))


def _hits_within(start: int, stop: int, hit_tokens: int) -> Iterator[int]:
    """The lengths between these at which a prefix hit may end, if none need end with a chunk."""
    if CHUNK_TOKENS % hit_tokens == 0:
        return
    first = start // hit_tokens * hit_tokens + hit_tokens
    yield from range(first, stop, hit_tokens)


@dataclass(frozen=True, slots=True)
class ProvenPrefix:
    """The leading chunks of a prompt that a client has proved to have, and that are listed here.

    Attributes:
        hashes: vLLM's hashes of the blocks that end in them.
    """

    chain: bytes
    chunks: list[ListedChunk]
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        hashes = [block_hash for chunk in self.chunks for block_hash in chunk.hashes]
        object.__setattr__(self, "hashes", hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.chunks) * CHUNK_TOKENS

    def digests(self, num_tokens: int) -> tuple[str, ...] | None:
        """The digests of so many of its tokens; None if their number ends within a chunk where none is known."""
        num_whole, num_more = divmod(num_tokens, CHUNK_TOKENS)
        whole = self.chain[: num_whole * DIGEST_BYTES].hex()
        size = 2 * DIGEST_BYTES
        digests = tuple(whole[at : at + size] for at in range(0, len(whole), size))
        if not num_more:
            return digests
        for length, digest in self.chunks[num_whole].parts:
            if length == num_tokens:
                return (*digests, digest)
        return None

    def shorter(self, num_tokens: int) -> int:
        """The greatest number of tokens below this one, or equal, that has digests."""
        num_whole, num_more = divmod(num_tokens, CHUNK_TOKENS)
        known = [num_whole * CHUNK_TOKENS]
        if num_more:
            known += [
                length
                for length, _ in self.chunks[num_whole].parts
                if length <= num_tokens
            ]
        return known[-1]
