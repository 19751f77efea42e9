"""Queries of other engines for leading tokens of their prompts, and what this engine has in its cache of them.

    the engine's thread                              the listener's thread
    reports ── sequences ──────────────────────────► listed by their digests
                                                     find: looked up in vLLM's prefix cache ◄── FindPrefixes ── clients
    take_wanted ◄── what was found ────────────────  Answer queued ─────────────────────────────────────────►
    opened, refused, changed ── queries ───────────► changes: Answer ticket, or over ───────────────────────►
    take_given_up ◄── those that nobody waits for ─  unsubscribe ◄───────────────────────── Unsubscribe ─── clients

Digests are made, and vLLM's cache is looked through, on the listener's thread. What it finds may be gone a moment
later: the engine's thread checks it again when it takes references on the blocks, and alone opens leases.

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

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import msgspec

from kvferry.link.counters import Counters
from kvferry.link.lock_pauses import LockPauses
from kvferry.protocol.digests import CHUNK_TOKENS, DIGEST_BYTES, GrowingChain, Prompt
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.queries import (
    Answer,
    Answers,
    FindPrefixes,
    PrefixQuery,
    PrefixRefusal,
    PromptProgress,
    Unsubscribe,
    encode_params,
)
from kvferry.scheduler.requests import Claimant, ProducerLease

MAX_CHUNKS = 1 << 15
"""Most chunks that are listed: eight million tokens, in some 40 MB with blocks of 16."""
MAX_OPEN = 1024
"""Most queries of all clients together that have found something; one more is refused."""
QUERY_S = 30.0
"""A query that is not repeated for this long is given up."""

_MAX_REPORTS = 4096
"""Most sequences that wait to be listed; the oldest is dropped first."""
_MANY_REPORTS = 64
"""From so many on the listener's thread lists them although no query has come."""
_LOOK_UPS = 3
"""A prefix that is gone when its blocks are to be kept is looked up again, so many times in all."""
_LENGTHS_TRIED = 4
"""A hit that ends where no digest is known is looked for again, shorter, so many times in all: each look-up takes time
for all of the prompt, and renewals wait for it."""
_FORGOTTEN_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What vLLM's prefix cache has of a sequence, at one moment.

    Attributes:
        num_tokens: how many of its first tokens.
        blocks: per cache group of the engine the blocks of these tokens, the null block (0) where none is needed.
        block_ids: all of them once, without the null block.
        hashes: vLLM's key of each of `block_ids`: as long as a block has it, it has this content, or will when the
            steps that were scheduled have run.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]


class PrefixLookup(Protocol):
    """vLLM's prefix cache.

    Attributes:
        hash_tokens: tokens of a block of which vLLM makes a hash; 0 if prefixes are not cached.
        hit_tokens: prefix hits end at multiples of it.
    """

    hash_tokens: int
    hit_tokens: int

    def find(
        self, hashes: Sequence[bytes], num_tokens: int, pause: Callable[[], None]
    ) -> CachedPrefix | None:
        """The longest prefix of a sequence with these hashes that is cached, at most so many tokens.

        May be called on any thread: what changes meanwhile is found, or not. None for nothing.

        Args:
            pause: called again and again meanwhile.
        """


MakeParams = Callable[[CachedPrefix, tuple[str, ...], ProducerLease], RemotePrefill]
"""The signed params of a prefix with these digests, under this lease."""


@dataclass(slots=True, eq=False)
class QueriedPrefix:
    """A query that has found a prefix.

    Attributes:
        claimant: whose query it is.
        peer: the routing id of the client's connection.
        proven: the part of its chain that is listed here.
        identity: what tells the query from another one of its number: the last digest of its chain, the chain's
            length, and the fewest tokens.
        found: what the listener's thread has found last.
        digests: of the tokens in `found`.
        generation: of the engine's cache when it was found.
        repeated_s: when the client sent the query last, by the directory's clock.
        look_ups: how often it was looked up.
        lease: set by the engine's thread when the blocks are held.
        refusal: why there will be no ticket; set by the engine's thread.
        is_given_up: whether nobody waits for the ticket any more; set by the listener's thread.
        encoded: the params of the ticket, once it was sent: then the lease is the client's.
    """

    claimant: Claimant
    peer: bytes
    proven: ProvenPrefix
    identity: tuple[bytes, int, int]
    found: CachedPrefix
    digests: tuple[str, ...]
    generation: int
    repeated_s: float
    look_ups: int = 1
    lease: ProducerLease | None = None
    refusal: PrefixRefusal | None = None
    is_given_up: bool = False
    encoded: msgspec.Raw | None = None

    @property
    def min_tokens(self) -> int:
        """A shorter prefix is of no use to the client."""
        return self.identity[2]


@dataclass(frozen=True, slots=True)
class PrefixDirectorySnapshot:
    """The directory at one moment.

    Attributes:
        num_chunks: that are listed.
        open: the queries that have found something and are not settled.
    """

    num_chunks: int
    open: frozenset[Claimant]


class PrefixDirectory:
    """Prefixes in one engine's cache, and queries for them: `kvferry.link.server.Prefixes`.

    Args:
        cache: of this engine.
        make_params: called on the listener's thread.
        counters: counts `prefixes_refused` by reason.
        clock: monotonic seconds.

    Attributes:
        wake: called on the engine's thread when there may be `changes` to send.
        wake_engine: called on the listener's thread when a step has something to do.
        generation: how often the engine's cache was emptied; changed by the engine's thread.
        reports: sequences to be listed, added by the engine's thread when a request whose blocks others may hit is
            scheduled, and again when it has grown.
        wanted: queries that have found something, for a step.
        given_up: queries that were given up; a step ends their leases.
    """

    def __init__(
        self,
        cache: PrefixLookup,
        make_params: MakeParams,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.wake_engine: Callable[[], None] = lambda: None
        self.generation = 0
        self._cache = cache
        self._make_params = make_params
        self._counters = counters
        self._clock = clock
        # Both threads add to and take from these without a lock.
        self.reports: deque[ListedSequence] = deque(maxlen=_MAX_REPORTS)
        self.wanted: deque[QueriedPrefix] = deque()
        self.given_up: deque[QueriedPrefix] = deque()
        self._news: deque[QueriedPrefix] = deque()
        # Of the listener's thread:
        self._index = PrefixIndex(MAX_CHUNKS)
        self._indexed_generation = 0
        # The one repeated longest ago is first.
        self._open: dict[Claimant, QueriedPrefix] = {}
        self._pauses = LockPauses()

    # For the engine's thread. None of it waits, and each takes the same time whatever others query.

    def reset(self) -> None:
        """The engine's cache is emptied, or its content means something else: all that was listed is forgotten."""
        self.generation += 1

    def take_wanted(self) -> list[QueriedPrefix]:
        """Queries that have found something since the last call."""
        return _take_all(self.wanted)

    def take_given_up(self) -> list[QueriedPrefix]:
        """Queries that were given up since the last call; the caller ends their leases."""
        return _take_all(self.given_up)

    def opened(self, queried: QueriedPrefix, lease: ProducerLease) -> None:
        """The blocks of what it has found are held under this lease."""
        queried.lease = lease
        self._report(queried)

    def refused(self, queried: QueriedPrefix, reason: PrefixRefusal) -> None:
        """It gets no ticket."""
        queried.refusal = reason
        self._report(queried)

    def changed(self, queried: QueriedPrefix) -> None:
        """What it has found is not in the cache any more: it is looked up again."""
        self._report(queried)

    # For the listener's thread.

    @property
    def has_news(self) -> bool:
        """Whether `changes` has something to do."""
        return bool(self._news) or len(self.reports) >= _MANY_REPORTS

    def snapshot(self) -> PrefixDirectorySnapshot:
        """What the listener's thread knows now. May be called on another thread while that one waits."""
        return PrefixDirectorySnapshot(len(self._index), frozenset(self._open))

    def find(self, peer: bytes, request: FindPrefixes) -> Answers:
        """Answer queries, and remember those that have found something until they are settled."""
        self._pauses.begin()
        self._list_reported()
        answers: list[Answer] = []
        for query in request.queries:
            claimant = (request.client_id, query.number)
            answers.append(self._find(claimant, peer, query))
            self._pauses.pause()
        return Answers(answers=tuple(answers))

    def unsubscribe(self, request: Unsubscribe) -> None:
        """These queries are settled. A lease whose ticket was not sent ends."""
        for number in request.numbers:
            self._forget((request.client_id, number))

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered queries since the last call, by connection."""
        self._pauses.begin()
        self._list_reported()
        self._forget_old()
        answers_by_peer: dict[bytes, list[Answer]] = {}
        for queried in _take_all(self._news):
            if self._open.get(queried.claimant) is not queried:
                continue
            if queried.lease is None and queried.refusal is None:
                self._look_up_again(queried)
            if queried.lease is not None or queried.refusal is not None:
                answers = answers_by_peer.setdefault(queried.peer, [])
                answers.append(self._answer(queried))
            self._pauses.pause()
        return [
            (peer, Answers(answers=tuple(answers)))
            for peer, answers in answers_by_peer.items()
        ]

    # On the engine's thread.

    def _report(self, queried: QueriedPrefix) -> None:
        self._news.append(queried)
        self.wake()

    # On the listener's thread.

    def _list_reported(self) -> None:
        """List the sequences that were reported, the newest first."""
        generation = self.generation
        if self._indexed_generation != generation:
            self._indexed_generation = generation
            self._index.clear()
        while self.reports:
            sequence = self.reports.pop()
            if sequence.generation != generation or not self._cache.hash_tokens:
                continue
            try:
                list_sequence(
                    self._index,
                    sequence,
                    self._cache.hash_tokens,
                    self._cache.hit_tokens,
                    self._pauses.pause,
                )
            except ValueError:
                # A token id that no digest covers. The request runs, and is found by nobody.
                continue

    def _find(self, claimant: Claimant, peer: bytes, query: PrefixQuery) -> Answer:
        chain = query.chain
        identity = (chain[-DIGEST_BYTES:], len(chain), query.min_tokens)
        now_s = self._clock()
        queried = self._open.get(claimant)
        if queried is not None and queried.identity == identity:
            queried.peer = peer
            queried.repeated_s = now_s
            self._open[claimant] = self._open.pop(claimant)
            return self._answer(queried)
        self._forget(claimant)
        proven = ProvenPrefix(chain, self._index.leading(chain))
        found = self._look_up(proven, query.min_tokens)
        if found is None:
            return self._refusal(query.number, PrefixRefusal.NO_PREFIX)
        if len(self._open) >= MAX_OPEN:
            return self._refusal(query.number, PrefixRefusal.NO_LEASE)
        cached, digests = found
        queried = QueriedPrefix(
            claimant=claimant,
            peer=peer,
            proven=proven,
            identity=identity,
            found=cached,
            digests=digests,
            generation=self._indexed_generation,
            repeated_s=now_s,
        )
        self._open[claimant] = queried
        self._want(queried)
        return self._answer(queried)

    def _look_up(
        self, proven: ProvenPrefix, min_tokens: int
    ) -> tuple[CachedPrefix, tuple[str, ...]] | None:
        """What is cached of a proven prefix, and its digests."""
        longest = proven.num_tokens
        for _ in range(_LENGTHS_TRIED):
            if longest < min_tokens:
                break
            found = self._cache.find(proven.hashes, longest, self._pauses.pause)
            if found is None or found.num_tokens < min_tokens:
                return None
            digests = proven.digests(found.num_tokens)
            if digests is not None:
                return found, digests
            # Windows and states are cached for one length: what is cached for this one may not do for a shorter.
            longest = proven.shorter(found.num_tokens)
        return None

    def _look_up_again(self, queried: QueriedPrefix) -> None:
        found = None
        is_listed = queried.generation == self.generation
        if is_listed and queried.look_ups < _LOOK_UPS:
            queried.look_ups += 1
            found = self._look_up(queried.proven, queried.min_tokens)
        if found is None:
            queried.refusal = PrefixRefusal.NO_PREFIX
            return
        queried.found, queried.digests = found
        self._want(queried)

    def _want(self, queried: QueriedPrefix) -> None:
        self.wanted.append(queried)
        self.wake_engine()

    def _answer(self, queried: QueriedPrefix) -> Answer:
        _, number = queried.claimant
        # Read once each: the engine's thread may set them at any moment.
        lease = queried.lease
        refusal = queried.refusal
        if lease is not None and lease.ended_by:
            refusal = PrefixRefusal.LEASE_OVER
        if refusal is not None:
            self._open.pop(queried.claimant, None)
            return self._refusal(number, refusal)
        if lease is None:
            return Answer(number=number, progress=PromptProgress.QUEUED)
        if queried.encoded is None:
            params = self._make_params(queried.found, queried.digests, lease)
            queried.encoded = encode_params(params)
        return Answer(
            number=number, progress=PromptProgress.TICKET, params=queried.encoded
        )

    def _refusal(self, number: int, reason: PrefixRefusal) -> Answer:
        self._counters.add("prefixes_refused", reason.value)
        return Answer(number=number, progress=PromptProgress.OVER, reason=reason.value)

    def _forget(self, claimant: Claimant) -> None:
        queried = self._open.pop(claimant, None)
        if queried is None or queried.encoded is not None:
            return
        queried.is_given_up = True
        self.given_up.append(queried)
        self.wake_engine()

    def _forget_old(self) -> None:
        now_s = self._clock()
        old: list[Claimant] = []
        for claimant, queried in islice(self._open.items(), _FORGOTTEN_AT_ONCE):
            if now_s < queried.repeated_s + QUERY_S:
                break
            old.append(claimant)
        for claimant in old:
            self._forget(claimant)


def _take_all(waiting: deque[QueriedPrefix]) -> list[QueriedPrefix]:
    taken: list[QueriedPrefix] = []
    while waiting:
        taken.append(waiting.popleft())
    return taken


# What was computed here, by digest.


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
        chain: the digests that were made so far. Of the listener's thread, as what follows.
        num_listed: how many tokens are listed.
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
