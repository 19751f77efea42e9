"""Conversations over two whole engines: real schedulers, real NIXL reads, and a router that carries the params of one
turn's answer to the next turn's prefill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.messages import FerryWorkerMetadata
from tests.harness.core.node import Node
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.harness.core.toy_model import expected_tokens
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TURNS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
FIRST = tokens(100)
MORE = tokens(50, seed=5)
COUNT = 40
"""Tokens of an answer."""


@pytest.fixture
def make() -> Iterator[Any]:
    nodes: list[Node] = []

    def build(**config: Any) -> Node:
        extra = {**TURNS, **config.pop("extra", {})}
        nodes.append(Node(config.pop("role", "kv_both"), extra=extra, **{"num_blocks": 80, **config}))
        return nodes[-1]

    yield build
    for node in nodes:
        node.close()


class Conversation:
    """A client and its router: every turn is prefilled on one engine and decoded on the other."""

    def __init__(self, prefiller: Node, decoder: Node) -> None:
        self.prefiller, self.decoder = prefiller, decoder
        self.text: list[int] = []
        self.offer: dict[str, Any] | None = None
        self.turns = 0

    def say(self, more: list[int], count: int = COUNT) -> None:
        """One turn; every token of the answer is checked."""
        self.text = [*self.text, *more]
        self.turns += 1
        params = self.prefill(f"p{self.turns}")
        self.decode(f"d{self.turns}", params, count)

    def prefill(self, name: str) -> dict[str, Any]:
        asked = json.loads(json.dumps(self.offer)) if self.offer else {"do_remote_decode": True}
        self.prefiller.engine.add(name, self.text, asked, max_tokens=1)
        params = self.prefiller.answer(name).params
        assert params is not None
        settle(self.prefiller)
        return params

    def decode(self, name: str, params: dict[str, Any], count: int = COUNT) -> None:
        self.decoder.engine.add(name, self.text, json.loads(json.dumps(params)), max_tokens=count)
        answer = self.decoder.answer(name)
        assert answer.tokens == expected_tokens(self.text, count, self.decoder.window)
        self.text += answer.tokens
        self.offer = answer.params
        settle(self.decoder)


def settle(node: Node) -> None:
    """Step until the workers know the held leases, whatever steps are in flight."""
    for _ in range(3):
        node.step()


def blocks(node: Node, before: float = 0) -> float:
    """Blocks that a node has loaded."""
    return node.engine.counted("planned_bytes") / (node.engine.block_bytes * len(node.workers)) - before


SHAPES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "overlapping steps": {"overlap": True},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
}


ROLES = {"kv_both": ("kv_both", "kv_both"), "a role each": ("kv_producer", "kv_consumer")}


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_second_turn_moves_only_what_the_first_did_not_in_either_direction(
    make: Any, config: dict[str, Any], roles: tuple[str, str]
) -> None:
    prefiller, decoder = (make(role=role, **config) for role in roles)
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    assert (blocks(prefiller), blocks(decoder)) == (0, 7)
    assert talk.offer is not None
    assert (talk.offer["do_remote_decode"], talk.offer["do_remote_prefill"]) == (True, False)
    assert talk.offer["remote_num_tokens"] == 100 + COUNT - 1, "the token that was sampled last has no cache"
    talk.say(MORE)
    # 139 tokens are in 9 blocks, of which the prefiller's own cache has the first 6 whole.
    assert blocks(prefiller) == 9 - 6
    # The decoder has 8 whole blocks of them: what is left are those up to token 190.
    assert blocks(decoder) == 7 + 12 - 8
    talk.say(MORE)
    assert blocks(prefiller) == 3 + (-(-229 // BLOCK_TOKENS) - 190 // BLOCK_TOKENS)
    for node in (prefiller, decoder):
        assert node.engine.counted("local_recomputes") == 0
    assert decoder.engine.counted("turns_offered") == 3
    assert decoder.engine.counted("turns_released", "done") == 2
    assert prefiller.engine.counted("turn_loads") == 2
    prefiller.until(lambda: prefiller.engine.is_whole)
    decoder.engine.connector.scheduler_side.leases.release_all("test")
    decoder.until(lambda: decoder.engine.is_whole)


def test_only_the_answer_is_computed_by_the_decoder_alone(make: Any) -> None:
    """The prefiller computes what is new and the token that was sampled last; the decoder the last token again."""
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    talk.text += MORE
    prefiller.engine.add("p", talk.text, talk.offer, max_tokens=1)
    computed = 0
    while prefiller.engine.answers["p"].finish_reason is None:
        computed += prefiller.step().computed.get("p", 0)
        time.sleep(0.001)
    assert computed == 1 + len(MORE)
    assert prefiller.engine.answers["p"].tokens == expected_tokens(talk.text, 1)


def test_only_a_read_of_the_decoder_explains_the_second_turn(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    decoder.model.poison()
    talk.text += MORE
    prefiller.engine.add("p", talk.text, talk.offer, max_tokens=1)
    assert prefiller.answer("p").tokens != expected_tokens(talk.text, 1)


def test_a_window_that_went_with_the_answer_is_read_back(make: Any) -> None:
    prefiller, decoder = make(window=48), make(window=48)
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    talk.say(MORE)
    talk.say(MORE)
    assert prefiller.engine.counted("turn_loads") == 2
    assert prefiller.engine.counted("local_recomputes") == 0


def test_a_conversation_that_was_tokenised_anew_is_read_up_to_the_last_equal_digest(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(tokens(240), 60)
    talk.text = [*talk.text[:280], *tokens(70, seed=8)]  # 299 tokens are offered, with digests of 256 and 299
    params = talk.prefill("p")
    assert blocks(prefiller) == (256 - 240) // BLOCK_TOKENS
    talk.decode("d", params)
    decoder.until(lambda: decoder.engine.counted("turns_released", "done") == 1)


def test_a_turn_of_another_conversation_is_computed_and_leaves_the_offer_to_its_time(make: Any) -> None:
    prefiller, decoder = make(), make(extra={"decoder_kv_blocks_ttl": 0.2})
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    talk.text = tokens(70, seed=9)
    talk.decode("d", talk.prefill("p"))
    assert prefiller.engine.counted("local_recomputes", "other_prompt") == 1
    prefiller.until(lambda: prefiller.engine.is_whole)
    decoder.until(lambda: decoder.engine.is_whole)
    assert decoder.engine.counted("turns_released", "expired") == 2


def test_an_unclaimed_offer_ends_with_its_time_and_is_not_counted_as_a_lost_prompt(make: Any) -> None:
    prefiller, decoder = make(), make(extra={"decoder_kv_blocks_ttl": 0.3, "kv_lease_duration": 60})
    talk = Conversation(prefiller, decoder)
    started_s = time.monotonic()
    talk.say(FIRST)
    held = decoder.engine.blocks_at_start - decoder.engine.free_blocks
    assert held == -(-(100 + COUNT - 1) // BLOCK_TOKENS)
    decoder.until(lambda: decoder.engine.is_whole)
    assert time.monotonic() - started_s >= 0.3
    decoder.step()
    assert decoder.engine.counted("turns_released", "expired") == 1
    assert decoder.engine.counted("leases_released") == 0


def test_a_stale_offer_is_refused_by_the_fence_and_computed(make: Any) -> None:
    prefiller, decoder = make(), make(extra={"decoder_kv_blocks_ttl": 0.1})
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    decoder.until(lambda: decoder.engine.is_whole)
    decoder.model.poison()
    decoder.engine.scheduler.reset_prefix_cache()
    talk.say(MORE)
    assert prefiller.engine.counted("failed_loads", "fence") == 1
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1


def test_a_restarted_decoder_offers_nothing_from_before_its_restart(make: Any) -> None:
    prefiller, decoder = make(extra={"handshake_timeout_s": 1.0}), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    port, engine_id = decoder.port, decoder.engine.config.kv_transfer_config.engine_id
    decoder.close()
    talk.decoder = make(port=port, engine_id=engine_id)
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1


def test_an_answer_that_was_aborted_is_not_offered(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.text = FIRST
    decoder.engine.add("d", FIRST, talk.prefill("p"), max_tokens=COUNT)
    decoder.until(lambda: len(decoder.engine.answers["d"].tokens) > 3)
    decoder.engine.abort("d")
    decoder.until(lambda: decoder.engine.is_whole)
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 0
    assert decoder.engine.counted("turns_released", "abandoned") == 1
    prefiller.until(lambda: prefiller.engine.is_whole)


def test_a_prefill_that_is_aborted_while_it_reads_the_last_turn_leaves_both_engines_whole(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    prefiller.engine.add("p2", [*talk.text, *MORE], talk.offer, max_tokens=1)
    prefiller.step()
    assert prefiller.engine.status("p2") == "WAITING_FOR_REMOTE_KVS"
    prefiller.engine.abort("p2")
    prefiller.until(lambda: prefiller.engine.is_whole)
    decoder.until(lambda: decoder.engine.is_whole)


def test_a_prefill_that_is_aborted_before_it_was_scheduled_gives_the_last_turn_back(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    prefiller.engine.add("p2", [*talk.text, *MORE], talk.offer, max_tokens=1)
    prefiller.engine.abort("p2")
    prefiller.step()
    decoder.until(lambda: decoder.engine.is_whole)
    decoder.step()
    assert decoder.engine.counted("turns_released", "release") == 1


def test_few_tokens_are_computed_rather_than_read(make: Any) -> None:
    prefiller, decoder = make(extra={"kv_recompute_threshold": 64}), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", "below_threshold") == 1
    assert prefiller.engine.counted("loads") == 0
    decoder.until(lambda: decoder.engine.counted("turns_released", "release") == 1)


def test_a_reader_that_waits_keeps_the_offer_alive_beyond_its_time(make: Any) -> None:
    prefiller, decoder = make(num_blocks=16), make(extra={"decoder_kv_blocks_ttl": 0.5, "kv_lease_duration": 0.6})
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    prefiller.until(lambda: prefiller.engine.is_whole)
    prefiller.engine.add("long", tokens(150, seed=6), max_tokens=60)
    prefiller.step()
    prefiller.engine.add("p2", [*talk.text, *MORE], talk.offer, max_tokens=1)
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        decoder.step()
        time.sleep(0.02)
    assert prefiller.answer("p2").tokens == expected_tokens([*talk.text, *MORE], 1)
    assert prefiller.engine.counted("turn_loads") == 1
    assert prefiller.engine.counted("local_recomputes") == 0


def test_offers_give_way_to_requests_that_need_their_blocks(make: Any) -> None:
    prefiller, decoder = make(), make(num_blocks=33)
    talks = [Conversation(prefiller, decoder) for _ in range(5)]
    for seed, talk in enumerate(talks, 20):
        talk.turns = 10 * seed
        talk.say(tokens(100, seed=seed))  # nine blocks of 32
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 5
    assert decoder.engine.counted("turns_released", "evicted") == 2, "three are held, and a block in eight is free"
    talks[-1].say(MORE)
    assert prefiller.engine.counted("turn_loads") == 1
    talks[0].say(MORE)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1, "the oldest went first"


def test_offers_give_way_to_a_request_that_needs_all_of_their_blocks(make: Any) -> None:
    decoder = make(num_blocks=33)
    talk = Conversation(make(), decoder)
    talk.say(FIRST)
    decoder.engine.add("long", tokens(480, seed=9), max_tokens=2)
    assert decoder.answer("long").tokens == expected_tokens(tokens(480, seed=9), 2)
    assert decoder.engine.counted("turns_released", "evicted") == 1


def test_an_offer_gives_way_to_a_request_that_was_preempted(make: Any) -> None:
    prefiller, decoder = make(), make(num_blocks=17)
    texts = {"d1": tokens(40, seed=20), "d2": tokens(40, seed=21)}
    params = {name: prefiller.prefill(f"p{name}", text) for name, text in texts.items()}
    first = decoder.engine.add("d1", texts["d1"], params["d1"], max_tokens=100)
    second = decoder.engine.add("d2", texts["d2"], params["d2"], max_tokens=110)
    decoder.answer("d1")
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert decoder.engine.status("d2") == "PREEMPTED"
    assert decoder.answer("d2").tokens == expected_tokens(texts["d2"], 110)
    assert decoder.engine.counted("turns_released", "evicted") == 1


def test_offers_give_way_to_a_large_request_behind_a_small_one_that_is_passed_over(make: Any) -> None:
    decoder = make(num_blocks=33)
    talk = Conversation(make(), decoder)
    talk.say(FIRST)
    small = decoder.engine.add("small", tokens(20, seed=8), max_tokens=2)
    small.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    decoder.engine.add("long", tokens(480, seed=9), max_tokens=2)
    assert decoder.answer("long").tokens == expected_tokens(tokens(480, seed=9), 2)
    assert decoder.engine.counted("turns_released", "evicted") == 1
    decoder.engine.abort("small")


def claim(talk: Conversation) -> None:
    """The next turn's prefill arrives at a prefiller that has no free blocks for it yet; its decoder has been asked."""
    talk.prefiller.until(lambda: talk.prefiller.engine.is_whole)
    talk.prefiller.engine.add("busy", tokens(150, seed=6), max_tokens=60)
    talk.prefiller.step()
    talk.prefiller.engine.add("next", [*talk.text, *MORE], talk.offer, max_tokens=1)
    listener = talk.decoder.engine.connector.scheduler_side._channel.listener
    wait_until(lambda: not listener.inbox.empty(), "the claim has arrived")


def test_an_offer_that_a_waiting_prefill_has_claimed_outlives_a_younger_unclaimed_one(make: Any) -> None:
    prefiller, decoder = make(num_blocks=16), make(num_blocks=33, extra={"kv_lease_duration": 600})
    talks = [Conversation(prefiller, decoder) for _ in range(2)]
    for seed, talk in enumerate(talks, 20):
        talk.turns = 10 * seed
        talk.say(tokens(100, seed=seed))  # nine blocks of 32
    claim(talks[0])
    decoder.engine.add("big", tokens(300, seed=9), max_tokens=2)
    decoder.answer("big")
    assert decoder.engine.counted("turns_released", "evicted") == 1
    assert prefiller.answer("next").tokens == expected_tokens([*talks[0].text, *MORE], 1)
    settle(prefiller)
    assert prefiller.engine.counted("turn_loads") == 1
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 0


def test_an_offer_that_a_waiting_prefill_has_claimed_is_evicted_only_when_nothing_else_helps(make: Any) -> None:
    prefiller, decoder = make(num_blocks=16), make(num_blocks=33)
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    claim(talk)
    decoder.engine.add("fits", tokens(350, seed=9), max_tokens=2)
    decoder.answer("fits")
    decoder.step()
    assert decoder.engine.counted("turns_released", "evicted") == 0, "a block in eight need not be free for that"
    decoder.engine.add("long", tokens(480, seed=10), max_tokens=2)
    decoder.answer("long")
    assert decoder.engine.counted("turns_released", "evicted") == 1
    assert prefiller.answer("next").tokens == expected_tokens([*talk.text, *MORE], 1)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1


def test_a_running_request_waits_for_the_blocks_of_an_offer_and_is_not_preempted(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two takes the last free block; the other needs one before the workers have reported the offer's end."""
    decoder = make(num_blocks=11)
    talk = Conversation(make(), decoder)
    talk.say(tokens(30), 6)  # three blocks of ten
    aggregate, ended, are_late = decoder._aggregator.aggregate, set[str](), True

    def report(outputs: Any) -> Any:
        whole = aggregate(outputs)
        reported = whole.kv_connector_output.kv_connector_worker_meta or FerryWorkerMetadata()
        ended.update(reported.over.get(0, ()))
        reported.over = {0: frozenset() if are_late else frozenset(ended)}
        whole.kv_connector_output.kv_connector_worker_meta = reported
        if not are_late:
            ended.clear()
        return whole

    prompts = {"a": tokens(32, seed=8), "b": tokens(31, seed=9)}
    requests = [decoder.engine.add(name, prompt, max_tokens=24) for name, prompt in prompts.items()]
    monkeypatch.setattr(decoder._aggregator, "aggregate", report)
    decoder.until(lambda: decoder.engine.free_blocks == 0)
    decoder.step()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert decoder.step().computed == {"a": 1}
    are_late = False
    for name, prompt in prompts.items():
        assert decoder.answer(name).tokens == expected_tokens(prompt, 24)
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert not decoder.engine.connector.has_pending_block_frees()


def test_a_request_that_waits_is_not_taken_to_need_more_of_a_window_than_it_can_hold(make: Any) -> None:
    decoder = make(num_blocks=100, window=48)
    talk = Conversation(make(window=48), decoder)
    talk.say(FIRST)
    for name, length in (("first", 140), ("waits", 480)):
        decoder.engine.add(name, tokens(length, seed=length), max_tokens=2)
    decoder.step()
    assert decoder.engine.status("waits") == "WAITING"
    decoder.answer("waits")
    decoder.step()
    assert decoder.engine.counted("turns_released", "evicted") == 0


def test_offers_give_way_when_slots_run_out(make: Any) -> None:
    prefiller, decoder = make(), make(extra={"lease_slots": 8})
    for seed in range(20, 30):
        talk = Conversation(prefiller, decoder)
        talk.turns = 10 * seed
        talk.say(tokens(20, seed=seed), 3)
    assert decoder.engine.counted("turns_offered") == 10
    assert decoder.engine.counted("turns_refused") == 0
    assert decoder.engine.counted("turns_released", "evicted") >= 2


def test_siblings_and_replays_of_a_turn_are_prefilled_all_the_same(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    text = [*talk.text, *MORE]
    for name in ("0_n", "1_n"):
        prefiller.engine.add(name, text, talk.offer, max_tokens=1)
    for name in ("0_n", "1_n"):
        answer = prefiller.answer(name)
        assert answer.tokens == expected_tokens(text, 1)
        assert answer.params is not None
    assert prefiller.engine.counted("turn_loads") == 1
    assert prefiller.engine.counted("local_recomputes", "lease_in_use") == 1
    prefiller.engine.add("replay", text, talk.offer, max_tokens=1)
    answer = prefiller.answer("replay")
    assert (answer.tokens, answer.params is not None) == (expected_tokens(text, 1), True)
    assert prefiller.engine.counted("turn_loads") == 1
    assert prefiller.engine.counted("local_recomputes", "lease_over") == 1


def test_siblings_of_an_answer_make_one_offer_since_they_have_one_response(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.text = FIRST
    params = talk.prefill("p")
    names = ("0_n", "1_n", "2_n")
    for name in names:
        decoder.engine.add(name, FIRST, params, max_tokens=COUNT)
    answers = [decoder.answer(name) for name in names]
    assert [answer.params is not None for answer in answers] == [True, False, False]
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 1


def test_the_turns_of_one_engine_are_in_its_own_cache_and_free_at_once(make: Any) -> None:
    prefiller, both = make(), make()
    talk = Conversation(prefiller, both)
    talk.say(FIRST)
    talk.prefiller, talk.decoder = both, prefiller
    talk.say(MORE)
    assert both.engine.counted("loads") == 1, "the first turn only"
    assert both.engine.counted("turns_released", "release") == 1


BAD: dict[str, Any] = {
    "of another connector": (lambda offer: offer.pop("kvferry"), "foreign_params"),
    "with a block that is none": (lambda offer: offer["remote_block_ids"][0].append("x"), "invalid_params"),
    "with other blocks": (lambda offer: offer["remote_block_ids"][0].reverse(), "load_failed"),
    "from another host": (lambda offer: offer.update(remote_host="localhost"), "load_failed"),
}


@pytest.mark.parametrize(("change", "reason"), BAD.values(), ids=BAD)
def test_an_offer_that_cannot_be_used_costs_a_computation_and_no_lease(make: Any, change: Any, reason: str) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    assert talk.offer is not None
    talk.offer = json.loads(json.dumps(talk.offer))
    change(talk.offer)
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", reason) == 1
    assert decoder.engine.counted("local_recomputes") == 0, "the second turn was handed over"


def test_what_routers_send_when_they_know_of_no_turn_asks_for_none(make: Any) -> None:
    prefiller, decoder = make(), make()
    talk = Conversation(prefiller, decoder)
    nulls = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    talk.offer = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nulls)}
    talk.say(FIRST)
    assert prefiller.engine.counted("local_recomputes") == 0


def test_an_engine_without_the_option_gives_an_offer_back(make: Any) -> None:
    prefiller, decoder = make(extra={"bidirectional_kv_xfer": False}), make()
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", "turns_off") == 1
    decoder.until(lambda: decoder.engine.counted("turns_released", "release") == 1)
    assert decoder.engine.counted("turns_offered") == 2


def test_without_the_option_no_answer_is_offered(make: Any) -> None:
    prefiller, decoder = make(), make(extra={"bidirectional_kv_xfer": False})
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    assert talk.offer is None
    assert decoder.engine.is_whole


@pytest.mark.parametrize("count", [1, 12, 13])
def test_an_answer_never_offers_a_token_of_a_step_in_flight(make: Any, count: int) -> None:
    prefiller, decoder = make(overlap=True), make(overlap=True)
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST, count)
    assert talk.offer is not None
    held = 100 + count - 1
    assert talk.offer["remote_num_tokens"] == held
    assert len(talk.offer["remote_block_ids"][0]) == -(-held // BLOCK_TOKENS)


def test_an_answer_that_stops_while_a_step_is_in_flight_offers_what_was_computed_before(make: Any) -> None:
    prefiller, decoder = make(overlap=True), make(overlap=True)
    talk = Conversation(prefiller, decoder)
    talk.text = FIRST
    stop = expected_tokens(FIRST, 13)[-1]
    decoder.engine.add("d", FIRST, talk.prefill("p"), max_tokens=40, stop_token_ids=[stop])
    answer = decoder.answer("d")
    assert len(answer.tokens) == 13
    assert answer.params is not None
    assert answer.params["remote_num_tokens"] == 112
    assert len(answer.params["remote_block_ids"][0]) == 7, "the step in flight has begun an eighth"
