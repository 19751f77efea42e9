"""Queries for prefixes, between a listener's thread and an engine's, both played by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvferry.link import lock_pauses
from kvferry.link.counters import Counters
from kvferry.protocol.digests import CHUNK_TOKENS, Prompt, digest_chain
from kvferry.protocol.queries import (
    Answer,
    FindPrefixes,
    PrefixQuery,
    PrefixRefusal,
    PromptProgress,
    Unsubscribe,
    chain_bytes,
)
from kvferry.scheduler.producer import prefix_directory
from kvferry.scheduler.producer.prefix_directory import (
    CachedPrefix,
    ListedSequence,
    PrefixDirectory,
    QueriedPrefix,
)
from kvferry.scheduler.requests import LeaseUse, ProducerLease

BLOCK = 16
LOOK_UP_PAUSES = 3
TOKENS = list(range(4 * CHUNK_TOKENS + 10))


class CacheModel:
    """A prefix cache of one full group: blocks by hash."""

    hash_tokens = BLOCK
    hit_tokens = BLOCK

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}

    def cache(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self.blocks.setdefault(block_hash, len(self.blocks) + 1)

    def find(
        self, hashes: Sequence[bytes], num_tokens: int, pause: Callable[[], None]
    ) -> CachedPrefix | None:
        for _ in range(LOOK_UP_PAUSES):
            pause()
        found = []
        for block_hash in hashes[: num_tokens // BLOCK]:
            if block_hash not in self.blocks:
                break
            found.append(block_hash)
        if not found:
            return None
        ids = tuple(self.blocks[block_hash] for block_hash in found)
        return CachedPrefix(len(ids) * BLOCK, (ids,), ids, tuple(found))


class SlowClock:
    """`time` of a machine on which a millisecond passes between two looks at the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps = 0

    def perf_counter(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def sleep(self, _: float) -> None:
        self.sleeps += 1


class Scene:
    """A directory, the cache under it, and a request whose tokens are listed and cached."""

    def __init__(self) -> None:
        self.cache = CacheModel()
        self.counters = Counters()
        self.now_s = 0.0
        self.wakes = 0
        self.engine_wakes = 0
        self.directory = PrefixDirectory(
            self.cache, self._make_params, self.counters, lambda: self.now_s
        )
        self.directory.wake = self._woken
        self.directory.wake_engine = self._engine_woken
        self.hashes = [b"%d" % end for end in range(BLOCK, len(TOKENS), BLOCK)]
        self.sequence = self.admit(TOKENS, self.hashes)
        self.cache.cache(self.hashes)

    def admit(self, tokens: Sequence[int], hashes: Sequence[bytes]) -> ListedSequence:
        sequence = ListedSequence(
            Prompt(tokens=tokens), hashes, len(tokens), self.directory.generation
        )
        self.directory.reports.append(sequence)
        return sequence

    def grow(self, sequence: ListedSequence, num_tokens: int) -> None:
        sequence.num_tokens = num_tokens
        self.directory.reports.append(sequence)

    def ask(self, number: int = 1, **changes: Any) -> Answer:
        request = FindPrefixes(client_id="d", queries=(query(number, **changes),))
        (answer,) = self.directory.find(b"peer", request).answers
        return answer

    def give_up(self, number: int = 1) -> None:
        self.directory.unsubscribe(Unsubscribe(client_id="d", numbers=(number,)))

    def wanted(self) -> QueriedPrefix:
        (queried,) = self.directory.take_wanted()
        return queried

    def change(self) -> Answer:
        ((peer, answers),) = self.directory.changes()
        assert peer == b"peer"
        (answer,) = answers.answers
        return answer

    def refused(self, reason: str) -> int:
        return self.counters.total("prefixes_refused", reason)

    def _woken(self) -> None:
        self.wakes += 1

    def _engine_woken(self) -> None:
        self.engine_wakes += 1

    def _make_params(
        self, cached: CachedPrefix, digests: tuple[str, ...], lease: ProducerLease
    ) -> Any:
        return [lease.request_id, cached.num_tokens, list(digests)]


def query(
    number: int = 1, tokens: Sequence[int] = TOKENS, min_tokens: int = 1
) -> PrefixQuery:
    whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    digests = digest_chain(Prompt(tokens=tokens), whole)
    return PrefixQuery(number=number, chain=chain_bytes(digests), min_tokens=min_tokens)


def has_news(scene: Scene) -> bool:
    return scene.directory.has_news


def needs_step(scene: Scene) -> bool:
    return bool(scene.directory.wanted or scene.directory.given_up)


def lease_of(name: str = "lease") -> ProducerLease:
    return ProducerLease(name, LeaseUse.PREFIX)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_prefix_is_found_held_and_given(scene: Scene) -> None:
    assert scene.ask().progress is PromptProgress.QUEUED
    assert scene.engine_wakes == 1
    assert needs_step(scene)
    queried = scene.wanted()
    assert not needs_step(scene)
    assert queried.found.num_tokens == 4 * CHUNK_TOKENS
    assert not has_news(scene)
    scene.directory.opened(queried, lease_of())
    assert scene.wakes == 1
    assert has_news(scene)
    answer = scene.change()
    assert answer.progress is PromptProgress.TICKET
    digests = list(digest_chain(Prompt(tokens=TOKENS), 4 * CHUNK_TOKENS))
    assert msgspec.msgpack.decode(answer.params) == ["lease", 1024, digests]
    assert scene.directory.changes() == []


def test_a_query_that_is_repeated_is_one(scene: Scene) -> None:
    scene.ask()
    assert scene.ask().progress is PromptProgress.QUEUED
    queried = scene.wanted()
    scene.directory.opened(queried, lease_of())
    first = scene.change()
    again = scene.ask()
    assert again.progress is PromptProgress.TICKET
    assert bytes(again.params) == bytes(first.params)
    assert not needs_step(scene)


def test_another_query_of_a_number_ends_the_one_before(scene: Scene) -> None:
    scene.ask()
    first = scene.wanted()
    assert scene.ask(min_tokens=300).progress is PromptProgress.QUEUED
    assert scene.directory.take_given_up() == [first]
    assert scene.wanted() is not first


@pytest.mark.parametrize(
    "asked",
    [
        {"tokens": [7, *TOKENS[1:]]},
        {"min_tokens": 4 * CHUNK_TOKENS + 1},
        {"tokens": [*TOKENS[:255], 7, *TOKENS[256:]]},
    ],
    ids=["other tokens", "too few", "other token in the first chunk"],
)
def test_who_cannot_present_a_prefix_learns_at_once_that_there_is_none(
    scene: Scene, asked: dict[str, Any]
) -> None:
    answer = scene.ask(**asked)
    assert answer == Answer(number=1, progress=PromptProgress.OVER, reason="no_prefix")
    assert not needs_step(scene)
    assert not scene.engine_wakes
    assert not scene.directory.snapshot().open
    assert scene.refused("no_prefix") == 1


def test_nothing_beyond_the_digests_that_were_sent_is_given(scene: Scene) -> None:
    scene.ask(tokens=TOKENS[:300])
    queried = scene.wanted()
    assert queried.found.num_tokens == CHUNK_TOKENS
    assert len(queried.digests) == 1


def test_what_is_listed_and_not_cached_is_not_found(scene: Scene) -> None:
    del scene.cache.blocks[scene.hashes[40]]
    scene.ask()
    assert scene.wanted().found.num_tokens == 2 * CHUNK_TOKENS, "whole chunks"
    scene.cache.blocks.clear()
    assert scene.ask(2).reason == "no_prefix"


def test_fewer_cached_tokens_than_are_of_use_are_none(scene: Scene) -> None:
    del scene.cache.blocks[scene.hashes[2 * CHUNK_TOKENS // BLOCK]]
    assert scene.ask(1, min_tokens=2 * CHUNK_TOKENS + 1).reason == "no_prefix"
    assert not needs_step(scene)
    scene.ask(2, min_tokens=2 * CHUNK_TOKENS)
    assert scene.wanted().found.num_tokens == 2 * CHUNK_TOKENS


def test_a_cache_whose_hits_end_at_no_digest_is_not_looked_through_for_every_length(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals wait meanwhile: a prompt of 128,000 tokens had 500 look-ups of milliseconds each."""
    whole = scene.cache.find
    tried: list[int] = []

    def one_block_less(
        hashes: Sequence[bytes], num_tokens: int, pause: Callable[[], None]
    ) -> CachedPrefix | None:
        tried.append(num_tokens)
        return whole(hashes, num_tokens - BLOCK, pause)

    monkeypatch.setattr(scene.cache, "find", one_block_less)
    tokens = list(range(20 * CHUNK_TOKENS))
    hashes = [b"%d" % end for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    scene.admit(tokens, hashes)
    scene.cache.cache(hashes)
    assert scene.ask(tokens=tokens).reason == "no_prefix"
    assert len(tried) == 4


def test_a_prefix_that_is_gone_in_the_step_is_looked_up_again(scene: Scene) -> None:
    scene.ask()
    queried = scene.wanted()
    del scene.cache.blocks[scene.hashes[40]]
    scene.directory.changed(queried)
    assert scene.directory.changes() == []
    assert scene.wanted() is queried
    assert queried.found.num_tokens == 2 * CHUNK_TOKENS
    scene.directory.changed(queried)
    scene.directory.changes()
    assert scene.wanted() is queried
    scene.directory.changed(queried)
    assert scene.change().reason == "no_prefix", "not for ever"


def test_the_engines_thread_gets_its_turn_while_a_long_prompt_is_listed_and_looked_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener's thread gives the interpreter's lock away whenever it has had it for long."""
    clock = SlowClock()
    monkeypatch.setattr(lock_pauses, "time", clock)
    scene.ask()
    assert clock.sleeps == 4 + LOOK_UP_PAUSES + 1, "each chunk, the look-up, the query"
    clock.sleeps = 0
    scene.directory.changed(scene.wanted())
    scene.directory.changes()
    assert clock.sleeps == LOOK_UP_PAUSES + 1


@pytest.mark.parametrize("reason", list(PrefixRefusal))
def test_a_refusal_of_the_engine_is_passed_on(
    scene: Scene, reason: PrefixRefusal
) -> None:
    scene.ask()
    scene.directory.refused(scene.wanted(), reason)
    answer = scene.change()
    assert (answer.progress, answer.reason) == (PromptProgress.OVER, reason.value)
    assert not scene.directory.snapshot().open
    assert scene.refused(reason.value) == 1


def test_a_query_that_is_given_up_before_its_ticket_gives_up_its_lease(
    scene: Scene,
) -> None:
    scene.ask()
    queried = scene.wanted()
    scene.give_up()
    assert queried.is_given_up
    assert scene.engine_wakes == 2
    scene.directory.opened(queried, lease_of())
    assert scene.directory.changes() == []
    assert scene.directory.take_given_up() == [queried]


def test_a_query_that_is_settled_with_its_ticket_keeps_its_lease(scene: Scene) -> None:
    scene.ask()
    scene.directory.opened(scene.wanted(), lease_of())
    scene.change()
    scene.give_up()
    assert not needs_step(scene)
    assert not scene.directory.snapshot().open


def test_a_ticket_whose_lease_is_over_is_not_given_again(scene: Scene) -> None:
    scene.ask()
    lease = lease_of()
    scene.directory.opened(scene.wanted(), lease)
    scene.change()
    lease.ended_by = "expired"
    assert scene.ask().reason == "lease_over"
    assert scene.ask().progress is PromptProgress.QUEUED, "a new one"


def test_a_query_that_is_not_repeated_is_given_up(scene: Scene) -> None:
    scene.ask(1)
    scene.now_s = prefix_directory.QUERY_S - 1
    scene.ask(2)
    first, second = scene.directory.take_wanted()
    scene.now_s = prefix_directory.QUERY_S
    scene.directory.changes()
    assert scene.directory.take_given_up() == [first]
    assert scene.directory.snapshot().open == {second.claimant}


def test_the_most_open_queries_are_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_directory, "MAX_OPEN", 2)
    assert scene.ask(1).progress is PromptProgress.QUEUED
    assert scene.ask(2).progress is PromptProgress.QUEUED
    assert scene.ask(3).reason == "no_lease"
    scene.give_up(1)
    assert scene.ask(3).progress is PromptProgress.QUEUED


def test_after_a_reset_nothing_of_before_is_found(scene: Scene) -> None:
    scene.ask(1)
    queried = scene.wanted()
    scene.directory.reset()
    scene.directory.changed(queried)
    assert scene.change().reason == "no_prefix"
    assert scene.ask(2).reason == "no_prefix"
    scene.grow(scene.sequence, len(TOKENS))
    assert scene.ask(3).reason == "no_prefix", "it was admitted before the reset"
    scene.admit(TOKENS, scene.hashes)
    assert scene.ask(4).progress is PromptProgress.QUEUED


def test_an_answer_is_the_beginning_of_the_next_prompt(scene: Scene) -> None:
    tokens = list(TOKENS)
    hashes = list(scene.hashes)
    sequence = scene.admit(tokens, hashes)
    longer = [*tokens, *range(5000, 5000 + CHUNK_TOKENS)]
    tokens += longer[len(tokens) :]
    hashes += [b"%d" % end for end in range(1040, len(longer) + 1, BLOCK)]
    scene.cache.cache(hashes)
    scene.ask(1, tokens=longer)
    assert scene.wanted().found.num_tokens == 4 * CHUNK_TOKENS
    scene.grow(sequence, len(tokens))
    scene.ask(2, tokens=longer)
    assert scene.wanted().found.num_tokens == 5 * CHUNK_TOKENS


def test_a_token_that_has_no_digest_hides_its_request_alone(scene: Scene) -> None:
    scene.admit([-1] * 300, [])
    assert scene.ask().progress is PromptProgress.QUEUED


def test_sequences_that_pile_up_are_listed_without_a_query(scene: Scene) -> None:
    assert not has_news(scene)
    for _ in range(prefix_directory._MANY_REPORTS):
        scene.grow(scene.sequence, len(TOKENS))
    assert has_news(scene)
    scene.directory.changes()
    assert not has_news(scene)
    assert scene.directory.snapshot().num_chunks == 4
