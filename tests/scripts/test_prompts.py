"""The prompts cover the lengths that matter and share prefixes only where they are meant to."""

from __future__ import annotations

import pytest

from scripts.accuracy.prompts import CaseSet, lengths, make_cases

BLOCK = 128


def cases(block: int = BLOCK, longest: int = 1500) -> CaseSet:
    return make_cases(range(40000), block, longest, 8)


def test_there_are_lengths_around_every_border() -> None:
    found = lengths(BLOCK, 1500)
    assert {1, 127, 128, 129, 255, 256, 257, 1500} <= set(found)
    assert found == sorted(found)
    assert max(lengths(16, 100)) == 100
    assert lengths(BLOCK, 1500, shortest=2) == found[1:]


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_hits_are_foreseen_as_a_prefix_cache_finds_them(block: int) -> None:
    """Replays vLLM's rule: whole blocks of earlier prompts and their answers, never the last token."""
    known: set[tuple[int, ...]] = set()
    for case in cases(block).sequence:
        if not isinstance(case.prompt, tuple) or case.chat:
            continue
        hit = 0
        while (hit + 1) * block < len(case.prompt) and case.prompt[
            : (hit + 1) * block
        ] in known:
            hit += 1
        assert case.hit_blocks == hit, case.name
        known |= {
            case.prompt[: count * block]
            for count in range(1, len(case.prompt) // block + 1)
        }


def test_what_is_asked_at_once_shares_nothing() -> None:
    every = cases()
    apart = [*every.crowd, *every.aborted, *every.poisoned]
    beginnings = [case.prompt[:1] for case in apart]
    assert len(set(beginnings)) == len(apart)
