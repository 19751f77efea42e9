"""The prompts cover the lengths that matter and share prefixes only where they are meant to."""

from __future__ import annotations

import pytest

from scripts.accuracy.client import body_of
from scripts.accuracy.prompts import Case, CaseSet, lengths, make_cases, running_text

BLOCK = 128


def cases(block: int = BLOCK, longest: int = 1500) -> CaseSet:
    return make_cases(range(40000), block, longest, 8)


def test_there_are_lengths_around_every_border() -> None:
    found = lengths(BLOCK, 1500)
    assert {1, 127, 128, 129, 255, 256, 257, 1500} <= set(found)
    assert found == sorted(found)
    assert max(lengths(16, 100)) == 100


def test_there_are_enough_prompts_of_every_kind() -> None:
    every = cases()
    assert len(every.sequence) + len(every.crowd) >= 48
    assert len({case.name for case in every.compared}) == len(every.compared)
    assert {(case.chat, case.stream) for case in every.sequence} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_hits_are_foreseen_as_a_prefix_cache_finds_them(block: int) -> None:
    """Replays vLLM's rule: whole blocks of earlier prompts and their answers, never the last token."""
    known: set[tuple[int, ...]] = set()
    for case in cases(block).sequence:
        if not isinstance(case.prompt, tuple) or case.chat:
            continue
        hit = 0
        while (hit + 1) * block < len(case.prompt) and case.prompt[: (hit + 1) * block] in known:
            hit += 1
        assert case.hit_blocks == hit, case.name
        known |= {case.prompt[: count * block] for count in range(1, len(case.prompt) // block + 1)}


def test_what_is_asked_at_once_shares_nothing() -> None:
    every = cases()
    apart = [*every.crowd, *every.aborted, *every.poisoned]
    beginnings = [case.prompt[:1] for case in apart]
    assert len(set(beginnings)) == len(apart)


def test_a_text_too_short_for_all_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1000 tokens; .* are needed"):
        make_cases(range(1000), BLOCK, 1500, 8)


def test_the_running_text_is_the_same_every_time() -> None:
    assert running_text(50) == running_text(50)
    assert running_text(50, seed=1) != running_text(50)


def test_requests_are_greedy_and_ask_for_ids_and_log_probabilities() -> None:
    plain = body_of(Case("a", (1, 2)), "m", kv_transfer_params={"x": 1})
    assert plain["prompt"] == [1, 2]
    assert (plain["temperature"], plain["return_token_ids"], plain["logprobs"]) == (0.0, True, 0)
    assert plain["kv_transfer_params"] == {"x": 1}
    chat = body_of(Case("b", messages=(("user", "hi"),), stream=True), "m")
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["logprobs"] is True
    assert "prompt" not in chat
