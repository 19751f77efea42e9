"""Passing and failing runs: each check gets a run with one defect; the table that shows them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from scripts.accuracy import checks
from scripts.accuracy.checks import Check, Comparison, Formula, Seen
from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import parse_metrics
from scripts.accuracy.prompts import Case
from scripts.accuracy.report import Report, show, verdict

CASES = [Case("one", (1,), max_tokens=2), Case("two", (2,), max_tokens=2)]
RIGHT = [Answer(tokens=(5, 6), logprobs=(-0.1, -0.2)), Answer(tokens=(7, 8), logprobs=(-0.3, -0.4))]
FORMULA = Formula(block=128, token_bytes=100, shape="s")


def failed(found: list[checks.Check]) -> list[str]:
    return [check.name for check in found if check.passed is False]


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
    assert list(comparison.differences) == ["two"]
    assert failed(checks.judge_tokens(comparison, None)) == ["same tokens as one engine"]


def test_log_probabilities_must_be_near() -> None:
    near = [RIGHT[0], replace(RIGHT[1], logprobs=(-0.3, -0.4005))]
    far = [RIGHT[0], replace(RIGHT[1], logprobs=(-0.3, -0.402))]
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, near), None)) == []
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, far), None)) == ["same log-probabilities"]


def test_without_exactness_the_single_engine_is_the_measure() -> None:
    def differing(count: int, prompts: int) -> Comparison:
        return Comparison(prompts, 0, {str(number): "" for number in range(count)}, 0.1)

    assert failed(checks.judge_tokens(differing(8, 24), differing(16, 48))) == []
    assert failed(checks.judge_tokens(differing(9, 24), differing(16, 48))) == ["tokens as near as one engine's own"]
    assert failed(checks.judge_tokens(differing(10, 24), differing(16, 48), tolerance=0.1)) == []
    assert failed(checks.judge_tokens(differing(11, 24), differing(16, 48), tolerance=0.1)) != []


def test_a_prompt_that_ever_differed_counts_once() -> None:
    other = Answer(tokens=(9, 9), logprobs=(-1.0, -1.0))
    first = checks.compare(CASES, RIGHT, [RIGHT[0], other])
    second = checks.compare(CASES, RIGHT, [other, other])
    both = checks.ever_different([first, second])
    assert sorted(both.differences) == ["one", "two"]
    assert both.prompts == 2


@pytest.mark.parametrize(
    ("prompt", "hit", "blocks"), [(1, 0, 1), (127, 0, 1), (128, 0, 1), (129, 0, 2), (256, 128, 1), (257, 256, 1)]
)
def test_the_formula_counts_whole_blocks_beyond_the_hit(prompt: int, hit: int, blocks: int) -> None:
    assert FORMULA.bytes_of([prompt], hit) == blocks * 128 * 100


def seen(nixl: int = 12800, planned: int = 12800, local: int = 0, prompt: int = 100) -> Seen:
    return Seen((prompt,), local, nixl, planned)


@pytest.mark.parametrize(
    ("found", "prompt", "hit", "allowed"),
    [
        (3200, 5, 0, True),
        (12800, 5, 0, True),
        (3199, 5, 0, False),
        (3200, 129, 96, False),
        (6400, 129, 96, True),
    ],
)
def test_staged_bytes_are_at_least_what_is_needed(found: int, prompt: int, hit: int, allowed: bool) -> None:
    formula = Formula(32, 100, "s", at_least=True)
    assert checks.judge_bytes({"a": seen(found, found, hit, prompt)}, formula, True).passed is allowed


@pytest.mark.parametrize("wrong", [seen(nixl=0), seen(nixl=12801), seen(nixl=25600), seen(planned=0)])
def test_bytes_must_agree_three_times(wrong: Seen) -> None:
    assert checks.judge_bytes({"a": seen(), "b": seen()}, FORMULA, True).passed
    assert not checks.judge_bytes({"a": seen(), "b": wrong}, FORMULA, True).passed


def test_no_transfer_at_all_is_seen_by_every_check_but_the_tokens() -> None:
    """A decoder that computes everything itself answers right: only the counters can tell."""
    nothing = Seen((100,), 0, 0, 0)
    assert failed(checks.judge_tokens(checks.compare(CASES, RIGHT, RIGHT), None)) == []
    assert not checks.judge_bytes({"a": nothing}, FORMULA, True).passed
    assert not checks.judge_computed(2, 2, 100).passed
    assert not checks.judge_poison(RIGHT, RIGHT, 0).passed


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
    assert checks.judge_poison(RIGHT, other, 1).passed
    assert not checks.judge_poison(RIGHT, [other[0], RIGHT[1]], 1).passed
    assert not checks.judge_poison(RIGHT, other, 0).passed
    assert not checks.judge_poison(RIGHT, [other[0], Answer(error="HTTP 500")], 1).passed


def test_one_leg_after_the_other_the_cache_moves_and_exact_tokens_are_equal() -> None:
    same, other = Comparison(2, 9, {}, 0.0), Comparison(2, 7, {"b": "from token 3 on"}, 0.0)
    assert checks.judge_in_turn(same, 1, exact=True).passed
    assert not checks.judge_in_turn(same, 0, exact=True).passed
    assert not checks.judge_in_turn(other, 1, exact=True).passed
    assert checks.judge_in_turn(other, 1, exact=False).passed


def test_some_bytes_are_read_before_a_prefill_has_ended() -> None:
    planned, early = (parse_metrics(f"vllm:kvferry_{kind}_bytes_total 40\n") for kind in ("planned", "early"))
    assert checks.judge_streams(early).passed
    assert not checks.judge_streams(planned).passed


def shown(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    return out.getvalue()


def test_the_table_shows_every_check_and_figure_as_it_is() -> None:
    report = Report("model [x]", [Check("a", True, "fine [api]"), Check("b", None, "why not")], {"figure": "1 ms"})
    text = shown(report)
    for part in ("model [x]", "fine [api]", "ok", "NOT RUN", "why not", "figure", "1 ms"):
        assert part in text
    assert "FAILED" not in text


def test_one_failed_check_fails_the_run() -> None:
    good = Report("a", [Check("a", True, ""), Check("b", None, "")])
    bad = Report("b", [Check("a", True, ""), Check("b", False, "")])
    assert verdict([good]) == 0
    assert verdict([good, bad]) == 1
    assert "FAILED" in shown(bad)


def test_a_run_without_any_check_has_not_passed() -> None:
    assert verdict([]) == 1
    assert verdict([Report("a")]) == 1
    assert verdict([Report("a", [Check("a", None, "not tried")])]) == 1
