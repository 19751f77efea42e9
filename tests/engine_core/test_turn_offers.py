"""Offers of turns give way to requests of their own engine that need their blocks or slots."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.messages import FerryWorkerMetadata
from tests.engine_core.conversation import COUNT, FIRST, MORE, Conversation
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.harness.core.toy_model import expected_tokens
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_an_unclaimed_offer_ends_with_its_time_and_is_not_counted_as_a_lost_prompt(
    begin: Any,
) -> None:
    _, decoder, talk = begin(
        decoder={"extra": {"decoder_kv_blocks_ttl": 0.3, "kv_lease_duration": 60}},
        first=False,
    )
    started_s = time.monotonic()
    talk.say(FIRST)
    assert decoder.engine.used_blocks == -(-(100 + COUNT - 1) // BLOCK_TOKENS)
    decoder.until(lambda: decoder.engine.is_whole)
    assert time.monotonic() - started_s >= 0.3
    decoder.step()
    assert decoder.engine.counted("turns_released", "expired") == 1
    assert decoder.engine.counted("leases_released") == 0


def test_offers_give_way_to_requests_that_need_their_blocks(make_both: Any) -> None:
    prefiller, decoder = make_both(), make_both(num_blocks=33)
    talks = [Conversation(prefiller, decoder) for _ in range(5)]
    for seed, talk in enumerate(talks, 20):
        talk.turns = 10 * seed
        talk.say(tokens(100, seed=seed))  # nine blocks of 32
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 5
    assert decoder.engine.counted("turns_released", "evicted") == 2, (
        "three are held, and a block in eight is free"
    )
    talks[-1].say(MORE)
    assert prefiller.engine.counted("turn_loads") == 1
    talks[0].say(MORE)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1, (
        "the oldest went first"
    )


@pytest.mark.parametrize(
    "passed_over",
    [False, True],
    ids=["alone", "behind a small one that is passed over"],
)
def test_offers_give_way_to_a_request_that_needs_all_of_their_blocks(
    begin: Any, passed_over: bool
) -> None:
    _, decoder, _ = begin(decoder={"num_blocks": 33})
    if passed_over:
        small = decoder.engine.add("small", tokens(20, seed=8), max_tokens=2)
        small.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    decoder.engine.add("long", tokens(480, seed=9), max_tokens=2)
    assert decoder.answer("long").tokens == expected_tokens(tokens(480, seed=9), 2)
    assert decoder.engine.counted("turns_released", "evicted") == 1
    if passed_over:
        decoder.engine.abort("small")


def test_an_offer_gives_way_to_a_request_that_was_preempted(make_both: Any) -> None:
    prefiller, decoder = make_both(), make_both(num_blocks=17)
    texts = {"d1": tokens(40, seed=20), "d2": tokens(40, seed=21)}
    params = {name: prefiller.prefill(f"p{name}", text) for name, text in texts.items()}
    first = decoder.engine.add("d1", texts["d1"], params["d1"], max_tokens=100)
    second = decoder.engine.add("d2", texts["d2"], params["d2"], max_tokens=110)
    decoder.answer("d1")
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert decoder.engine.status("d2") == "PREEMPTED"
    assert decoder.answer("d2").tokens == expected_tokens(texts["d2"], 110)
    assert decoder.engine.counted("turns_released", "evicted") == 1


def claim(talk: Conversation) -> None:
    """The next turn's prefill arrives at a prefiller that has no free blocks for it yet; its decoder has been asked."""
    talk.prefiller.until(lambda: talk.prefiller.engine.is_whole)
    talk.prefiller.engine.add("busy", tokens(150, seed=6), max_tokens=60)
    talk.prefiller.step()
    talk.prefiller.engine.add("next", [*talk.text, *MORE], talk.offer, max_tokens=1)
    listener = talk.decoder.engine.connector.scheduler_side.channel.listener
    wait_until(lambda: bool(listener.inbox.received), "the claim has arrived")


def test_an_offer_that_a_waiting_prefill_has_claimed_is_evicted_only_when_nothing_else_helps(
    begin: Any,
) -> None:
    prefiller, decoder, talk = begin(
        prefiller={"num_blocks": 16}, decoder={"num_blocks": 33}
    )
    claim(talk)
    decoder.engine.add("fits", tokens(350, seed=9), max_tokens=2)
    decoder.answer("fits")
    decoder.step()
    assert decoder.engine.counted("turns_released", "evicted") == 0, (
        "a block in eight need not be free for that"
    )
    decoder.engine.add("long", tokens(480, seed=10), max_tokens=2)
    decoder.answer("long")
    assert decoder.engine.counted("turns_released", "evicted") == 1
    assert prefiller.answer("next").tokens == expected_tokens([*talk.text, *MORE], 1)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1


def test_a_running_request_waits_for_the_blocks_of_an_offer_and_is_not_preempted(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two takes the last free block; the other needs one before the workers have reported the offer's end."""
    _, decoder, talk = begin(decoder={"num_blocks": 11}, first=False)
    talk.say(tokens(30), 6)  # three blocks of ten
    aggregate, ended, are_late = decoder.aggregator.aggregate, set[str](), True

    def report(outputs: Any) -> Any:
        whole = aggregate(outputs)
        reported = (
            whole.kv_connector_output.kv_connector_worker_meta or FerryWorkerMetadata()
        )
        ended.update(reported.sent.get(0, ()))
        reported.sent = {0: frozenset() if are_late else frozenset(ended)}
        whole.kv_connector_output.kv_connector_worker_meta = reported
        if not are_late:
            ended.clear()
        return whole

    prompts = {"a": tokens(32, seed=8), "b": tokens(31, seed=9)}
    requests = [
        decoder.engine.add(name, prompt, max_tokens=24)
        for name, prompt in prompts.items()
    ]
    monkeypatch.setattr(decoder.aggregator, "aggregate", report)
    decoder.until(lambda: decoder.engine.free_blocks == 0)
    decoder.step()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert decoder.step().computed == {"a": 1}
    are_late = False
    for name, prompt in prompts.items():
        assert decoder.answer(name).tokens == expected_tokens(prompt, 24)
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert not decoder.engine.connector.has_pending_block_frees()


def test_a_request_that_waits_is_not_taken_to_need_more_of_a_window_than_it_can_hold(
    begin: Any,
) -> None:
    _, decoder, _ = begin(
        prefiller={"window": 48}, decoder={"num_blocks": 100, "window": 48}
    )
    for name, length in (("first", 140), ("waits", 480)):
        decoder.engine.add(name, tokens(length, seed=length), max_tokens=2)
    decoder.step()
    assert decoder.engine.status("waits") == "WAITING"
    decoder.answer("waits")
    decoder.step()
    assert decoder.engine.counted("turns_released", "evicted") == 0


def test_offers_give_way_when_slots_run_out(make_both: Any) -> None:
    prefiller, decoder = make_both(), make_both(extra={"lease_slots": 8})
    for seed in range(20, 30):
        talk = Conversation(prefiller, decoder)
        talk.turns = 10 * seed
        talk.say(tokens(20, seed=seed), 3)
    assert decoder.engine.counted("turns_offered") == 10
    assert decoder.engine.counted("turns_refused") == 0
    assert decoder.engine.counted("turns_released", "evicted") >= 2
