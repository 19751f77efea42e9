"""Prefixes that other engines find in this engine's cache, in vLLM's own scheduler."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.scheduler_side import prefixes
from kvferry.connector.scheduler_side.taken_back import TakeBacks
from kvferry.connector.vllm.prefix_cache import PrefixCache
from kvferry.protocol.digests import CHUNK_TOKENS, Prompt
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.queries import PromptProgress
from kvferry.protocol.slots import (
    SlotState,
    slot_word,
)
from kvferry.scheduler.producer import ledger
from kvferry.scheduler.producer.prefix_directory import PrefixDirectory
from kvferry.scheduler.requests import LeaseState, ProducerLease
from tests.connector.test_adapters import adapter, content, request
from tests.engine_core.prefixes import (
    LONG,
    Asker,
    asking,
    compute,
    params_of,
    query_of,
    side_of,
)
from tests.harness.core.node import Node
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.promises import promise
from tests.waiting import wait_until

PROMPT = tokens(1056, seed=3)
PREFIX_BLOCKS = 1024 // BLOCK_TOKENS


def held(node: Node) -> list[ProducerLease]:
    leases: list[ProducerLease] = side_of(node).leases.leases(LeaseState.HELD)
    return leases


def release(node: Node, lease: ProducerLease) -> None:
    """As a message of the client has it."""
    side_of(node).leases.release(lease.name)


def words(node: Node, slot: int) -> int:
    (worker,) = node.ferry_workers
    snapshot = worker.snapshot(30.0)
    assert snapshot is not None
    return int(snapshot.leases.words.get(slot, 0))


def test_a_prefix_that_is_cached_is_held_for_who_has_the_prompt(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    free = node.engine.free_blocks
    with asking(node) as asker:
        params = asker.ticket(query_of(PROMPT))
    assert params.remote_num_tokens == 1024
    assert node.engine.free_blocks == free - PREFIX_BLOCKS
    (lease,) = held(node)
    assert params.remote_block_ids == (lease.block_ids,)
    release(node, lease)
    node.until(lambda: node.engine.is_whole)
    assert node.engine.counted("prefixes_opened") == 1
    assert node.engine.counted("prefixes_released", "release") == 1


def test_a_repeated_query_gets_the_same_lease(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        first = asker.ticket(query_of(PROMPT))
        again = asker.ask(query_of(PROMPT))
        assert again.progress is PromptProgress.TICKET
        assert params_of(node, again) == first
    assert len(side_of(node).leases) == 1


def test_an_idle_engine_is_asked_and_its_slot_becomes_ready(make: Any) -> None:
    """It takes a step for that and no other: nothing of the blocks is computed in it."""
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    node.until(lambda: not node.must_step)
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        assert asker.receive().progress is PromptProgress.QUEUED
        assert node.must_step
        step = node.step()
        assert not step.computed
        name = params_of(node, asker.receive()).kvferry
    epoch = int(name.lease_epoch, 16)
    ready = slot_word(epoch, SlotState.READY)  # type: ignore[arg-type]
    wait_until(lambda: words(node, name.lease_slot) == ready, "it is READY")


def test_a_running_request_is_a_source_as_far_as_it_is_scheduled(make: Any) -> None:
    node = make("kv_both", **{**LONG, "max_step_tokens": 256})
    node.engine.add("own", PROMPT, max_tokens=1)
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        assert asker.receive().reason == "no_prefix"
        node.step()
        node.step()
        assert asker.ticket(query_of(PROMPT, 2)).remote_num_tokens >= 512
        node.answer("own")
        assert asker.ticket(query_of(PROMPT, 3)).remote_num_tokens == 1024


def test_the_answer_of_a_decode_is_found_with_its_prompt(make: Any) -> None:
    node = make("kv_both", **LONG)
    # The second chunk ends with six tokens of the answer.
    prompt = tokens(2 * CHUNK_TOKENS - 6, seed=5)
    answer = compute(node, "own", prompt, 20)
    with asking(node) as asker:
        params = asker.ticket(query_of([*prompt, *answer, *tokens(9)]))
    assert params.remote_num_tokens == 2 * CHUNK_TOKENS


def test_a_shorter_prompt_is_given_what_it_has_alone(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        other = [*PROMPT[:600], *tokens(500, seed=8)]
        params = asker.ticket(query_of(other))
    assert params.remote_num_tokens == 512
    assert len(params.remote_block_ids[0]) == 512 // BLOCK_TOKENS


def test_a_client_that_cannot_present_a_prompt_gets_nothing(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    node.engine.add("salted", PROMPT, max_tokens=1, cache_salt="secret")
    node.answer("salted")
    node.until(lambda: not node.must_step)
    changed = [PROMPT[0] + 1, *PROMPT[1:]]

    def salted(**fields: Any) -> Prompt:
        return Prompt(salt="guess", **fields)

    with asking(node) as asker:
        for number, query in enumerate(
            (query_of(changed), query_of(PROMPT, make_prompt=salted))
        ):
            answer = asker.ask(query)
            assert answer.reason == "no_prefix", number
            assert bytes(answer.params) == b"\x80"
        assert not node.must_step, "no step is taken for it"
    assert not len(side_of(node).leases)


def test_a_salted_prompt_is_found_by_who_has_the_salt(make: Any) -> None:
    node = make("kv_both", **LONG)
    node.engine.add("own", PROMPT, max_tokens=1, cache_salt="secret")
    node.answer("own")

    def salted(**fields: Any) -> Prompt:
        return Prompt(salt="secret", **fields)

    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT)).reason == "no_prefix"
        query = query_of(PROMPT, 2, make_prompt=salted)
        assert asker.ticket(query).remote_num_tokens == 1024


def test_blocks_that_were_reused_are_not_given(make: Any) -> None:
    node = make("kv_both", **{**LONG, "num_blocks": 160})
    compute(node, "own", PROMPT[:600])
    for seed in range(20, 24):
        compute(node, f"other{seed}", tokens(1500, seed=seed))
    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT[:600])).reason == "no_prefix"


def test_a_long_prefix_is_taken_in_several_steps(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_AT_ONCE", 24)
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    free = node.engine.free_blocks
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        asker.receive()
        for kept in (24, 48):
            node.step()
            assert node.engine.free_blocks == free - kept
            assert not len(side_of(node).leases)
            assert node.must_step
        node.step()
        assert asker.receive().progress is PromptProgress.TICKET
    assert node.engine.free_blocks == free - PREFIX_BLOCKS


def test_a_look_up_gives_the_interpreters_lock_away_again_and_again(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    cache = PrefixCache()
    cache.bind(node.engine.scheduler.kv_cache_manager)
    hashes = node.engine.make_request("looked up", PROMPT).block_hashes
    pauses: list[int] = []
    found = cache.find(hashes, 1024, lambda: pauses.append(1))
    assert found is not None
    assert found.num_tokens == 1024
    assert len(pauses) >= 2 * PREFIX_BLOCKS // 32, "of hashes, and of blocks"


def test_a_prefix_that_is_gone_before_the_step_is_looked_up_again(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    node.until(lambda: not node.must_step)
    manager = node.engine.scheduler.kv_cache_manager
    cached = manager.get_computed_blocks(node.engine.make_request("r", PROMPT))[0]
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        assert asker.receive().progress is PromptProgress.QUEUED
        manager.evict_blocks({cached.get_block_ids()[0][40]})
        node.until(asker.has_answer)
        assert params_of(node, asker.receive()).remote_num_tokens == 512


def test_blocks_that_this_step_fills_are_ready_when_it_has_run(make: Any) -> None:
    node = make("kv_both", **{**LONG, "max_step_tokens": 512})
    node.engine.add("own", PROMPT, max_tokens=1)
    with asking(node) as asker:
        node.step()
        asker.send(query_of(PROMPT[:520]))
        assert asker.receive().progress is PromptProgress.QUEUED
        step = node.step()
        assert step.computed
        (order,) = step.orders.completions
        assert not step.orders.holds
        assert order.request_id == held(node)[0].request_id
        asker.receive()
    node.answer("own")


def test_what_vllm_may_take_back_is_not_given_before_it_is_settled(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    asked: list[int] = []

    def may_come(_: TakeBacks, blocks: Sequence[int]) -> bool:
        asked.append(len(blocks))
        return len(asked) < 3

    monkeypatch.setattr(TakeBacks, "may_come", may_come)
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        asker.receive()
        for _ in range(2):
            node.step()
            assert not held(node)
        node.step()
        assert held(node)
        assert asker.receive().progress is PromptProgress.TICKET
    assert asked == [PREFIX_BLOCKS] * 3


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_what_vllm_takes_back_ends_a_prefix_or_is_not_given(
    make: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_AT_ONCE", 24)
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        asker.receive()
        for _ in range(steps):
            node.step()
        side = side_of(node)
        manager = node.engine.scheduler.kv_cache_manager
        cached = manager.get_computed_blocks(node.engine.make_request("r", PROMPT))[0]
        first = cached.get_block_ids()[0][0]
        not_filled = side.tickets.taken_back({first})
        side.prefix_leases.taken_back(not_filled)
        assert not held(node)
        if steps < 3:
            assert asker.receive().reason == "no_prefix"
    node.until(lambda: node.engine.is_whole and not node.must_step)


def test_a_query_that_is_given_up_leaves_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCKS_AT_ONCE", 24)
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    for steps in range(5):
        with asking(node) as asker:
            asker.send(query_of(PROMPT))
            asker.receive()
            for _ in range(steps):
                node.step()
            if steps >= 3:
                assert asker.receive().progress is PromptProgress.TICKET
                release(node, *held(node))
            asker.give_up(1)
            asker.send(query_of(tokens(300), 9))  # its answer: the other one was read
            assert asker.receive().reason == "no_prefix"
        node.until(lambda: node.engine.is_whole and not node.must_step)
    assert not side_of(node).prefix_leases.needs_step


def test_a_lease_that_is_given_up_before_its_ticket_is_sent_ends(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    monkeypatch.setattr(PrefixDirectory, "changes", lambda directory: [])
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        assert asker.receive().progress is PromptProgress.QUEUED
        node.step()
        assert held(node)
        asker.give_up(1)
        node.until(lambda: node.engine.is_whole)
    node.until(lambda: node.engine.counted("prefixes_released", "release") == 1)


def test_a_lease_that_nobody_renews_expires(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledger.PREFIX_S == 5.0
    monkeypatch.setattr(ledger, "PREFIX_S", 0.5)
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        asker.ticket(query_of(PROMPT))
    (lease,) = held(node)
    leases = side_of(node).leases
    assert lease.deadline_s - leases.clock.awake_s <= 0.5
    node.until(lambda: node.engine.is_whole)
    assert node.engine.counted("prefixes_released", "expired") == 1


def test_a_renewal_keeps_it_as_any_lease(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        params = asker.ticket(query_of(PROMPT))
    (lease,) = held(node)
    name = LeaseName(slot=params.kvferry.lease_slot, epoch=params.kvferry.lease_epoch)
    leases = side_of(node).leases
    assert leases.renew(name)
    assert lease.deadline_s > leases.clock.awake_s + 20


@promise(9)
def test_prefixes_have_their_share_of_the_cache(make: Any) -> None:
    node = make("kv_both", **{**LONG, "num_blocks": 400})
    for seed in (3, 4):
        compute(node, f"own{seed}", tokens(1056, seed=seed))
    with asking(node) as asker:
        asker.ticket(query_of(PROMPT))
        answer = asker.ask(query_of(tokens(1056, seed=4), 2))
        assert answer.reason == "no_lease", "64 and 64 blocks are more than 100"
        (lease,) = held(node)
        release(node, lease)
        node.until(lambda: not len(side_of(node).leases))
        asker.ticket(query_of(tokens(1056, seed=4), 3))


@promise(9)
def test_prefixes_have_their_share_of_the_slots(make: Any) -> None:
    node = make("kv_both", **LONG, extra={"lease_slots": 8})
    compute(node, "own", PROMPT[:300])
    with asking(node) as asker:
        for number in (1, 2):
            asker.ticket(query_of(PROMPT[:300], number))
        assert asker.ask(query_of(PROMPT[:300], 3)).reason == "no_lease"


@promise(9)
def test_no_prefix_is_held_while_few_blocks_are_free(make: Any) -> None:
    node = make("kv_both", **{**LONG, "num_blocks": 160})
    compute(node, "own", PROMPT[:300])
    node.engine.add("large", tokens(1990, seed=9), max_tokens=50)
    # With the 16 blocks of the prefix fewer than an eighth were left; its share of the cache would do.
    node.until(lambda: node.engine.free_blocks < 36)
    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT[:300])).reason == "no_lease"
        node.answer("large")
        asker.ticket(query_of(PROMPT[:300], 2))


@promise(9)
def test_no_prefix_is_held_while_few_slots_are_free(make: Any) -> None:
    node = make("kv_both", **LONG, extra={"lease_slots": 8})
    compute(node, "own", PROMPT[:300])
    for number in range(7):
        node.prefill(f"p{number}", tokens(20, seed=number + 20))
    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT[:300])).reason == "no_lease"
        release(node, held(node)[0])
        node.until(lambda: len(side_of(node).leases) == 6)
        asker.ticket(query_of(PROMPT[:300], 2))


@promise(9)
def test_the_engines_own_requests_do_not_wait_for_prefixes(make: Any) -> None:
    """They go as soon as an eighth of the blocks is not free."""
    node = make("kv_both", **{**LONG, "num_blocks": 160})
    compute(node, "own", PROMPT[:600])
    with asking(node) as asker:
        asker.ticket(query_of(PROMPT[:600]))
    assert held(node)
    node.engine.add("large", tokens(2000, seed=9), max_tokens=20)
    computed = [node.step().computed.get("large", 0) for _ in range(5)]
    assert sum(computed) >= 2000
    assert 0 not in computed[:4]
    node.answer("large")
    assert node.engine.counted("prefixes_released", "evicted") == 1


@promise(9)
def test_a_request_that_does_not_fit_beside_a_prefix_gets_its_blocks(make: Any) -> None:
    node = make("kv_both", **{**LONG, "num_blocks": 150})
    compute(node, "own", PROMPT[:600])
    with asking(node) as asker:
        asker.ticket(query_of(PROMPT[:600]))
    node.engine.add("large", tokens(2000, seed=9), max_tokens=20)
    node.answer("large")
    assert node.engine.counted("prefixes_released", "evicted") == 1


def test_a_reset_of_the_cache_ends_prefixes_and_forgets_prompts(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        asker.ticket(query_of(PROMPT))
        asker.send(query_of(PROMPT, 2))
        asker.receive()
        node.engine.connector.reset_cache()
        node.until(lambda: node.engine.is_whole)
        assert asker.receive().reason == "no_prefix"
        assert node.engine.scheduler.reset_prefix_cache()
        assert asker.ask(query_of(PROMPT, 3)).reason == "no_prefix"
        compute(node, "again", PROMPT)
        asker.ticket(query_of(PROMPT, 4))
    assert node.engine.counted("prefixes_released", "reset") == 1


def test_other_weights_forget_what_was_listed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds blocks of the new weights by the hashes of before."""
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    weights = side_of(node).channel.local.weights
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        asker.receive()
        monkeypatch.setattr(weights, "is_attached", True)
        monkeypatch.setattr(weights, "version", lambda: "v2")
        node.until(asker.has_answer)
        assert asker.receive().reason == "no_prefix"
        assert asker.ask(query_of(PROMPT, 2)).reason == "no_prefix"


@promise(1)
def test_another_content_of_an_adapter_forgets_what_was_listed(
    make: Any, tmp_path: Path
) -> None:
    """vLLM fills blocks of the new one under the hashes of before."""
    node = make("kv_both", **LONG)
    path = adapter(tmp_path / "adapter")
    with_first = functools.partial(Prompt, lora=content(path))
    with asking(node) as asker:
        compute(node, "first", PROMPT, lora_request=request(path))
        asker.ticket(query_of(PROMPT, 1, make_prompt=with_first))
        release(node, *held(node))
        node.until(lambda: node.engine.is_whole)
        # By an operator who does not know of the connector: it is not told.
        assert node.engine.scheduler.reset_prefix_cache()
        adapter(path, fill=2)
        compute(node, "second", PROMPT, lora_request=request(path, number=2))
        query = query_of(PROMPT, 2, make_prompt=with_first)
        assert asker.ask(query).reason == "no_prefix"


def test_a_prompt_is_not_listed_whose_adapter_may_change_in_any_step(
    make: Any, tmp_path: Path
) -> None:
    node = make("kv_both", **LONG)
    path = adapter(tmp_path / "adapter")
    compute(node, "own", PROMPT, lora_request=request(path, load_inplace=True))
    with_it = functools.partial(Prompt, lora=content(path))
    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT, make_prompt=with_it)).reason == "no_prefix"


def test_a_sleep_forgets_what_was_listed(make: Any) -> None:
    node = make("kv_both", **LONG)
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        asker.send(query_of(PROMPT))
        assert asker.receive().progress is PromptProgress.QUEUED
        side_of(node).withdrawn()
        node.until(asker.has_answer)
        assert asker.receive().reason == "no_prefix"
        assert asker.ask(query_of(PROMPT, 2)).reason == "no_prefix"


def test_an_engine_that_is_set_not_to_says_so(make: Any) -> None:
    node = make("kv_both", **LONG, extra={"prefix_pulls": "off"})
    compute(node, "own", PROMPT)
    with asking(node) as asker:
        assert asker.ask(query_of(PROMPT)).reason == "prefix_off"


WINDOW = 48


@pytest.mark.parametrize(
    "shape",
    [{}, {"window": WINDOW}, {"overlap": True}],
    ids=["full", "window", "overlapping"],
)
def test_what_is_given_is_what_vllm_itself_would_hit(
    make: Any, shape: dict[str, Any]
) -> None:
    """Under pressure: prompts of one family, in a cache that holds few of them."""
    node = make("kv_both", **{**LONG, "num_blocks": 220, **shape})
    draw = random.Random(7)
    starts = [tokens(1400, seed=seed) for seed in (11, 12, 13)]
    found = 0
    with asking(node) as asker:
        for number in range(40):
            prompt = draw.choice(starts)[: draw.randrange(200, 1400)]
            prompt = [*prompt, *tokens(draw.randrange(1, 200), seed=number + 50)]
            if draw.random() < 0.6:
                compute(node, f"own{number}", prompt, draw.choice([1, 40]))
                node.until(lambda: not node.must_step)
                continue
            hit = hit_of(node, prompt)
            found += bool(hit)
            check(asker, node, query_number=number, prompt=prompt, hit=hit)
    assert found >= 5


def hit_of(node: Node, prompt: Sequence[int]) -> int:
    """Tokens that vLLM would hit of a prompt's whole chunks."""
    manager = node.engine.scheduler.kv_cache_manager
    whole = len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS
    request = node.engine.make_request("looked up", [*prompt[:whole], 1])
    _, hit, _ = manager.get_computed_blocks(request)
    return int(hit)


def check(
    asker: Asker, node: Node, *, query_number: int, prompt: Sequence[int], hit: int
) -> None:
    answer = asker.ask(query_of(prompt, query_number))
    if hit < CHUNK_TOKENS:
        assert answer.reason == "no_prefix"
        return
    if answer.progress is PromptProgress.OVER:
        assert answer.reason == "no_lease"
        return
    assert params_of(node, answer).remote_num_tokens == hit // 256 * 256
    release(node, *held(node))
    node.until(lambda: node.engine.is_whole and not node.must_step)
