"""Passing and failing runs: each check gets a run with one defect; the table that shows them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from scripts.accuracy import checks
from scripts.accuracy.checks import Check, Comparison, Formula, Seen
from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case
from scripts.accuracy.report import Report, show, verdict

CASES = [Case("one", (1,), max_tokens=2), Case("two", (2,), max_tokens=2)]
RIGHT = [
    Answer(tokens=(5, 6), logprobs=(-0.1, -0.2), likeliest=({5: -0.1}, {6: -0.2})),
    Answer(
        tokens=(7, 8), logprobs=(-0.3, -1.0), likeliest=({7: -0.3}, {8: -1.0, 9: -1.1})
    ),
]
EXPECTED = {"one": RIGHT[0], "two": RIGHT[1]}
FORMULA = Formula(block=128, token_bytes=100, shape="s")


def failed(found: list[checks.Check]) -> list[str]:
    return [check.name for check in found if check.passed is False]


def judged(other: Answer, dtype: str) -> list[str]:
    """Failed checks where the second prompt is answered so."""
    return failed(
        checks.judge_tokens(checks.compare(CASES, EXPECTED, [RIGHT[0], other]), dtype)
    )


@pytest.mark.parametrize("dtype", checks.LIMITS)
@pytest.mark.parametrize(
    "other",
    [
        Answer(tokens=(7, 9), logprobs=(-0.3, -0.4)),
        Answer(tokens=(7,), logprobs=(-0.3,)),
        Answer(tokens=(7, 8), logprobs=(-0.3,)),
        Answer(error="HTTP 500"),
        Answer(),
    ],
    ids=[
        "another token",
        "a token missing",
        "a log-probability missing",
        "an error",
        "nothing",
    ],
)
def test_another_answer_fails(other: Answer, dtype: str) -> None:
    assert list(checks.compare(CASES, EXPECTED, [RIGHT[0], other]).differences) == [
        "two"
    ]
    assert "same tokens as one engine" in judged(other, dtype)


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [("float32", 5e-4, 2e-3), ("float16", 0.12, 0.13), ("bfloat16", 0.9, 1.1)],
)
def test_log_probabilities_must_be_near(dtype: str, near: float, far: float) -> None:
    for gap, wrong in ((near, False), (far, True)):
        assert (
            "same log-probabilities"
            in judged(replace(RIGHT[1], logprobs=(-0.3, -1.0 - gap)), dtype)
        ) is wrong


@pytest.mark.parametrize(
    ("tokens", "likeliest", "dtype", "right"),
    [
        ((7, 9), {9: -0.9, 8: -1.2}, "bfloat16", True),
        ((7, 9), {9: -0.05, 8: -1.2}, "bfloat16", False),  # 1.05 for token 9
        ((7, 9), {9: -0.9, 8: -2.1}, "bfloat16", False),  # 1.1 for token 8
        ((7, 9), {9: -0.9}, "bfloat16", False),
        (
            (7, 3),
            {3: -0.9, 8: -1.2},
            "bfloat16",
            False,
        ),  # the single engine does not think of it
        ((7, 9), {9: -1.1, 8: -1.1}, "float32", False),
    ],
)
def test_another_token_is_right_only_where_both_engines_rate_both_tokens_alike(
    tokens: tuple[int, ...], likeliest: dict[int, float], dtype: str, right: bool
) -> None:
    other = Answer(tokens, (-0.3, max(likeliest.values())), ({7: -0.3}, likeliest))
    assert (judged(other, dtype) == []) is right
    in_turn = checks.judge_in_turn(
        checks.compare(CASES, EXPECTED, [RIGHT[0], other]), 1, 0, dtype
    )
    assert in_turn.passed is right


@pytest.mark.parametrize(
    ("prompt", "hit", "blocks"),
    [(1, 0, 1), (127, 0, 1), (128, 0, 1), (129, 0, 2), (256, 128, 1), (257, 256, 1)],
)
def test_the_formula_counts_whole_blocks_beyond_the_hit(
    prompt: int, hit: int, blocks: int
) -> None:
    assert FORMULA.bytes_of([prompt], hit) == blocks * 128 * 100


def seen(
    nixl: int = 12800, planned: int = 12800, local: int = 0, prompt: int = 100
) -> Seen:
    return Seen((prompt,), local, nixl, planned)


@pytest.mark.parametrize(
    "wrong", [seen(nixl=0), seen(nixl=12801), seen(nixl=25600), seen(planned=0)]
)
def test_bytes_must_agree_three_times(wrong: Seen) -> None:
    assert checks.judge_bytes({"a": seen(), "b": seen()}, FORMULA, True).passed
    assert not checks.judge_bytes({"a": seen(), "b": wrong}, FORMULA, True).passed


def test_without_a_formula_every_prompt_moves_something_unless_it_was_a_hit() -> None:
    assert checks.judge_bytes(
        {"a": seen(), "b": seen(nixl=0, local=100)}, None, True
    ).passed
    found = checks.judge_bytes({"a": seen(), "b": seen(nixl=0)}, None, True)
    assert (found.passed, "nothing for b" in found.detail) == (False, True)


def test_where_rounding_decides_it_decides_for_few_prompts_and_moves_no_mean() -> None:
    other = Answer((9, 8), (-0.4, -1.0), ({7: -0.4, 9: -0.4}, {8: -1.0}))
    right = replace(RIGHT[1], likeliest=({7: -0.3, 9: -0.35}, {8: -1.0}))
    cases = [replace(CASES[1], name=str(number)) for number in range(4)]
    expected = {case.name: right for case in cases}
    for differ, passes in ((0, True), (2, True), (3, False), (4, False)):
        compared = checks.compare(
            cases, expected, [other] * differ + [right] * (4 - differ)
        )
        assert compared.is_near("bfloat16")
        assert (failed(checks.judge_tokens(compared, "bfloat16")) == []) is passes
    shifted = replace(RIGHT[1], logprobs=(-0.6, -1.3))
    both = checks.compare([CASES[1]] * 2, {"two": RIGHT[1]}, [shifted, shifted])
    assert both.is_near("bfloat16")
    assert failed(checks.judge_tokens(both, "bfloat16")) == [
        "same tokens as one engine",
        "same log-probabilities",
    ]
    nan = replace(RIGHT[1], logprobs=(float("nan"), -1.0))
    assert not checks.compare([CASES[1]], {"two": RIGHT[1]}, [nan]).is_near("bfloat16")


def test_no_transfer_at_all_is_seen_by_every_check_but_the_tokens() -> None:
    """A decoder that computes everything itself answers right: only the counters can tell."""
    nothing = Seen((100,), 0, 0, 0)
    assert judged(RIGHT[1], "float32") == []
    assert not checks.judge_bytes({"a": nothing}, FORMULA, True).passed
    assert not checks.judge_computed(2, 2, 100).passed


def test_poison_must_change_every_answer_beyond_rounding_and_be_transferred() -> None:
    def judged_poison(second: Answer, moved: int = 1) -> bool | None:
        return checks.judge_poison(
            CASES, EXPECTED, [Answer(tokens=(1, 1)), second], moved, "bfloat16"
        ).passed

    rounded = Answer((7, 9), (-0.3, -0.9), ({7: -0.3}, {9: -0.9, 8: -1.2}))
    assert judged_poison(Answer(tokens=(2, 2)))
    assert not judged_poison(Answer(tokens=(2, 2)), moved=0)
    assert not any(map(judged_poison, (RIGHT[1], rounded, Answer(error="HTTP 500"))))


def test_one_leg_after_the_other_the_cache_moves() -> None:
    assert checks.judge_in_turn(Comparison(2, 9, {}, 0.0), 1, 0, "float32").passed
    assert not checks.judge_in_turn(Comparison(2, 9, {}, 0.0), 0, 0, "float32").passed
    assert not checks.judge_in_turn(Comparison(2, 9, {}, 0.0), 1, 1, "float32").passed


def shown(report: Report) -> str:
    out = io.StringIO()
    show(report, out)
    return out.getvalue()


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
