"""Conversations over two whole engines: real schedulers, real NIXL reads, and a router that carries the params of one
turn's answer to the next turn's prefill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine_core.conversation import COUNT, FIRST, MORE, Conversation, blocks
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens

pytestmark = pytest.mark.slow


SHAPES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "overlapping steps": {"overlap": True},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
}


ROLES = {
    "kv_both": ("kv_both", "kv_both"),
    "a role each": ("kv_producer", "kv_consumer"),
}


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_second_turn_moves_only_what_the_first_did_not_in_either_direction(
    make_both: Any, config: dict[str, Any], roles: tuple[str, str]
) -> None:
    prefiller, decoder = (make_both(role=role, **config) for role in roles)
    talk = Conversation(prefiller, decoder)
    talk.say(FIRST)
    assert (blocks(prefiller), blocks(decoder)) == (0, 7)
    assert talk.offer is not None
    assert (talk.offer["do_remote_decode"], talk.offer["do_remote_prefill"]) == (
        True,
        False,
    )
    assert talk.offer["remote_num_tokens"] == 100 + COUNT - 1, (
        "the token that was sampled last has no cache"
    )
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
    decoder.engine.connector.scheduler_side.leases.release_all("reset")
    decoder.until(lambda: decoder.engine.is_whole)


def test_a_window_that_went_with_the_answer_is_read_back(begin: Any) -> None:
    prefiller, _, talk = begin(window=48)
    talk.say(MORE)
    talk.say(MORE)
    assert prefiller.engine.counted("turn_loads") == 2
    assert prefiller.engine.counted("local_recomputes") == 0


def test_a_turn_of_another_conversation_is_computed_and_leaves_the_offer_to_its_time(
    begin: Any,
) -> None:
    prefiller, decoder, talk = begin(decoder={"extra": {"decoder_kv_blocks_ttl": 0.2}})
    talk.text = tokens(70, seed=9)
    talk.decode("d", talk.prefill("p"))
    assert prefiller.engine.counted("local_recomputes", "other_prompt") == 1
    prefiller.until(lambda: prefiller.engine.is_whole)
    decoder.until(lambda: decoder.engine.is_whole)
    assert decoder.engine.counted("turns_released", "expired") == 2


def test_an_answer_that_was_aborted_is_not_offered(begin: Any) -> None:
    prefiller, decoder, talk = begin(first=False)
    talk.text = FIRST
    decoder.engine.add("d", FIRST, talk.prefill("p"), max_tokens=COUNT)
    decoder.until(lambda: len(decoder.engine.answers["d"].tokens) > 3)
    decoder.engine.abort("d")
    decoder.until(lambda: decoder.engine.is_whole)
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 0
    assert decoder.engine.counted("turns_released", "abandoned") == 1
    prefiller.until(lambda: prefiller.engine.is_whole)


@pytest.mark.parametrize(
    "reads",
    [True, False],
    ids=["while it reads the last turn", "before it was scheduled"],
)
def test_a_prefill_that_is_aborted_leaves_both_engines_whole(
    begin: Any, reads: bool
) -> None:
    prefiller, decoder, talk = begin()
    prefiller.engine.add("p2", [*talk.text, *MORE], talk.offer, max_tokens=1)
    if reads:
        prefiller.step()
        assert prefiller.engine.status("p2") == "WAITING_FOR_REMOTE_KVS"
    prefiller.engine.abort("p2")
    prefiller.until(lambda: prefiller.engine.is_whole)
    decoder.until(lambda: decoder.engine.is_whole)
    decoder.step()
    if not reads:
        assert decoder.engine.counted("turns_released", "release") == 1


UNREAD = {
    "few tokens": ({"kv_recompute_threshold": 64}, "below_threshold"),
    "an engine without the option": ({"bidirectional_kv_xfer": False}, "turns_off"),
}


@pytest.mark.parametrize(("extra", "reason"), UNREAD.values(), ids=UNREAD)
def test_what_a_prefiller_does_not_read_is_computed_and_given_back(
    begin: Any, extra: dict[str, Any], reason: str
) -> None:
    prefiller, decoder, talk = begin({"extra": extra})
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", reason) == 1
    assert prefiller.engine.counted("loads") == 0
    decoder.until(lambda: decoder.engine.counted("turns_released", "release") == 1)
    assert decoder.engine.counted("turns_offered") == 2


def test_siblings_of_an_answer_make_one_offer_since_they_have_one_response(
    begin: Any,
) -> None:
    _, decoder, talk = begin(first=False)
    talk.text = FIRST
    params = talk.prefill("p")
    names = ("0_n", "1_n", "2_n")
    for name in names:
        decoder.engine.add(name, FIRST, params, max_tokens=COUNT)
    answers = [decoder.answer(name) for name in names]
    assert [answer.params is not None for answer in answers] == [True, False, False]
    decoder.step()
    assert decoder.engine.counted("turns_offered") == 1


def test_the_turns_of_one_engine_are_in_its_own_cache_and_free_at_once(
    make_both: Any,
) -> None:
    prefiller, both = make_both(), make_both()
    talk = Conversation(prefiller, both)
    talk.say(FIRST)
    talk.prefiller, talk.decoder = both, prefiller
    talk.say(MORE)
    assert both.engine.counted("loads") == 1, "the first turn only"
    # The release comes as a message of the side channel.
    both.until(lambda: both.engine.counted("turns_released", "release") == 1)


BAD: dict[str, Any] = {
    "of another connector": (lambda offer: offer.pop("kvferry"), "foreign_params"),
    "with a block that is none": (
        lambda offer: offer["remote_block_ids"][0].append("x"),
        "invalid_params",
    ),
    "with other blocks": (
        lambda offer: offer["remote_block_ids"][0].reverse(),
        "load_failed",
    ),
    "from another host": (
        lambda offer: offer.update(remote_host="localhost"),
        "load_failed",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD.values(), ids=BAD)
def test_an_offer_that_cannot_be_used_costs_a_computation_and_no_lease(
    begin: Any, change: Any, reason: str
) -> None:
    prefiller, decoder, talk = begin()
    assert talk.offer is not None
    talk.offer = json.loads(json.dumps(talk.offer))
    change(talk.offer)
    talk.say(MORE)
    assert prefiller.engine.counted("local_recomputes", reason) == 1
    assert decoder.engine.counted("local_recomputes") == 0, (
        "the second turn was handed over"
    )


def test_without_the_option_no_answer_is_offered(begin: Any) -> None:
    _, decoder, talk = begin(decoder={"extra": {"bidirectional_kv_xfer": False}})
    assert talk.offer is None
    assert decoder.engine.is_whole
