"""Passing and failing runs: each check gets a run with one defect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.accuracy import checks
from scripts.accuracy.checks import Comparison, Difference, Formula, Seen
from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case

CASES = [Case("one", (1,), max_tokens=2), Case("two", (2,), max_tokens=2)]
RIGHT = [Answer(tokens=(5, 6), logprobs=(-0.1, -0.2)), Answer(tokens=(7, 8), logprobs=(-0.3, -0.4))]
FORMULA = Formula(block=128, token_bytes=100, shape="s")


def failed(found: list[checks.Check]) -> list[str]:
    return [check.name for check in found if check.passed is False]


def test_equal_answers_pass() -> None:
    comparison = checks.compare(CASES, RIGHT, RIGHT)
    assert (comparison.tokens, comparison.differences, comparison.largest_gap) == (4, (), 0.0)
    assert failed(checks.judge_tokens(comparison, None)) == []


@pytest.mark.parametrize(
    "other",
    [
        Answer(tokens=(7, 9), logprobs=(-0.3, -0.4)),
        Answer(tokens=(7,), logprobs=(-0.3,)),
        Answer(tokens=(7, 8), logprobs=(-0.3,)),
        Answer(error="HTTP 500"),
        Answer(),
    ],
    ids=["another token", "a token missing", "a log-probability missing", "an error", "nothing"],
)
def test_another_answer_fails(other: Answer) -> None:
    comparison = checks.compare(CASES, RIGHT, [RIGHT[0], other])
    assert [difference.name for difference in comparison.differences] == ["two"]
    assert failed(checks.judge_tokens(comparison, None)) == ["same tokens as one engine"]


def test_both_sides_empty_is_not_equal() -> None:
    assert checks.compare(CASES[:1], [Answer()], [Answer()]).differences


def test_log_probabilities_must_be_near() -> None:
    near = [RIGHT[0], replace(RIGHT[1], logprobs=(-0.3, -0.4005))]
    far = [RIGHT[0], replace(RIGHT[1], logprobs=(-0.3, -0.402))]
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, near), None)) == []
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, far), None)) == ["same log-probabilities"]


def test_without_exactness_the_single_engine_is_the_measure() -> None:
    def differing(count: int, prompts: int) -> Comparison:
        return Comparison(prompts, 0, tuple(Difference(str(n), 0, "") for n in range(count)), 0.1)

    assert failed(checks.judge_tokens(differing(8, 24), differing(16, 48))) == []
    assert failed(checks.judge_tokens(differing(9, 24), differing(16, 48))) == ["tokens as near as one engine's own"]


def test_a_prompt_that_ever_differed_counts_once() -> None:
    other = Answer(tokens=(9, 9), logprobs=(-1.0, -1.0))
    first = checks.compare(CASES, RIGHT, [RIGHT[0], other])
    second = checks.compare(CASES, RIGHT, [other, other])
    both = checks.ever_different([first, second])
    assert sorted(difference.name for difference in both.differences) == ["one", "two"]
    assert both.prompts == 2


@pytest.mark.parametrize(
    ("prompt", "hit", "blocks"), [(1, 0, 1), (127, 0, 1), (128, 0, 1), (129, 0, 2), (256, 128, 1), (257, 256, 1)]
)
def test_the_formula_counts_whole_blocks_beyond_the_hit(prompt: int, hit: int, blocks: int) -> None:
    assert FORMULA.bytes_of(prompt, hit) == blocks * 128 * 100


@pytest.mark.parametrize(
    ("found", "prompt", "hit", "allowed"),
    [
        (3200, 5, 0, True),
        (12800, 5, 0, True),
        (3199, 5, 0, False),
        (12801, 5, 0, False),
        (3200, 129, 96, False),
        (6400, 129, 96, True),
        (25600, 129, 96, True),
        (25601, 129, 96, False),
    ],
)
def test_what_is_staged_is_between_what_is_needed_and_the_producers_whole_blocks(
    found: int, prompt: int, hit: int, allowed: bool
) -> None:
    formula = Formula(32, 100, "s", more=Formula(128, 100, "s"))
    assert formula.allows(found, prompt, hit) is allowed


def test_bytes_that_are_no_more_than_needed_are_exactly_those() -> None:
    assert [FORMULA.allows(n, 100, 0) for n in (12799, 12800, 12801)] == [False, True, False]


def seen(nixl: int = 12800, planned: int = 12800, local: int = 0) -> Seen:
    return Seen(100, local, 100, 1, nixl, planned)


@pytest.mark.parametrize("wrong", [seen(nixl=0), seen(nixl=25600), seen(planned=0)])
def test_bytes_must_agree_three_times(wrong: Seen) -> None:
    assert failed(checks.judge_bytes({"a": seen(), "b": seen()}, FORMULA, True)) == []
    assert failed(checks.judge_bytes({"a": seen(), "b": wrong}, FORMULA, True))


def test_bytes_that_cancel_out_over_two_prompts_fail() -> None:
    assert failed(checks.judge_bytes({"a": seen(nixl=0), "b": seen(nixl=25600)}, FORMULA, True))


def test_bytes_of_a_crowd_are_summed() -> None:
    answers = [Answer(prompt_tokens=100), Answer(prompt_tokens=129)]
    total = Seen(229, 0, 229, 2, 38400, 38400)
    assert checks.judge_crowd_bytes(answers, total, FORMULA, True).passed
    assert not checks.judge_crowd_bytes(answers, replace(total, nixl_bytes=1), FORMULA, True).passed
    assert not checks.judge_crowd_bytes(answers, replace(total, local_tokens=128), FORMULA, True).passed


def test_no_transfer_at_all_is_seen_by_every_check_but_the_tokens() -> None:
    """A decoder that computes everything itself answers right: only the counters can tell."""
    nothing = Seen(100, 0, 0, 0, 0, 0)
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, RIGHT), None)) == []
    assert failed(checks.judge_bytes({"a": nothing}, FORMULA, True))
    assert not checks.judge_computed(2, 2, 100).passed
    assert not checks.judge_poison(CASES, RIGHT, RIGHT, 0).passed


def test_one_prompt_token_is_computed_for_each_prompt() -> None:
    assert checks.judge_computed(5, 5, 5).passed
    assert not checks.judge_computed(5, 5, 6).passed
    assert not checks.judge_computed(5, 4, 5).passed


def test_hits_must_happen_where_they_were_foreseen() -> None:
    cases = [Case("again", (1,), hit_blocks=1), Case("text", "x", hit_blocks=None)]
    assert checks.judge_hits(cases, {"again": seen(local=128), "text": seen(local=256)}, 128).passed
    assert not checks.judge_hits(cases, {"again": seen(local=0), "text": seen()}, 128).passed


def test_poison_must_change_every_answer_and_be_transferred() -> None:
    other = [Answer(tokens=(1, 1)), Answer(tokens=(2, 2))]
    assert checks.judge_poison(CASES, RIGHT, other, 1).passed
    assert not checks.judge_poison(CASES, RIGHT, [other[0], RIGHT[1]], 1).passed
    assert not checks.judge_poison(CASES, RIGHT, other, 0).passed
    assert not checks.judge_poison(CASES, RIGHT, [other[0], Answer(error="HTTP 500")], 1).passed


def test_percentiles_are_those_of_nearest_rank() -> None:
    values = [float(value) for value in range(1, 21)]
    assert (checks.percentile(values, 0.5), checks.percentile(values, 0.99)) == (10.0, 20.0)
    assert checks.percentile([float("nan")], 0.5) is None
