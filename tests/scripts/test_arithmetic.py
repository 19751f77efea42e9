"""The arithmetic task: its questions, how the final number is taken, and which scores fail the run."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from scripts.accuracy import arithmetic, checks, phases
from scripts.accuracy.arithmetic import Question, Score
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.report import Report, verdict

SEVEN, FIFTY = Question("What is 3 + 4?", "3 + 4 = 7", 7), Question("What is 20 + 30?", "20 + 30 = 50", 50)


def scored(*texts: str) -> Score:
    return arithmetic.score([SEVEN, FIFTY], [Answer(text=text) for text in texts])


RIGHT, HALF, NONE = scored("#### 7", "#### 50"), scored("#### 7", "#### 51"), scored("#### 8", "#### 51")


def status(check: checks.Check) -> int:
    """The script's exit status when this check stands beside one that passed."""
    return verdict([Report("run", [checks.Check("other", True, ""), check])])


def test_the_same_seed_gives_the_same_questions_and_no_question_is_an_example() -> None:
    asked = arithmetic.questions()
    assert asked == arithmetic.questions()
    assert asked != arithmetic.questions(seed=15)
    assert len({question.text for question in asked}) == arithmetic.QUESTIONS == 32
    for question, case in zip(asked, arithmetic.cases(asked), strict=True):
        assert isinstance(case.prompt, str)
        assert case.prompt.count(question.text) == 1
        assert case.prompt.endswith(f"Question: {question.text}\nAnswer:")
        assert case.prompt.count("#### ") == 6


def test_a_worked_answer_fits_into_the_tokens_that_are_asked_for_with_a_token_a_character() -> None:
    """Tokenizers differ; one that has a token for every digit, sign and blank before a number needs the most."""
    asked = arithmetic.questions()
    for question, case in zip(asked, arithmetic.cases(asked), strict=True):
        marked = f" {question.worked}\n#### {question.result}".replace("####", "#")
        tokens = len(marked.replace(" +", "+").replace(" =", "="))
        assert tokens <= case.max_tokens


def test_the_right_result_is_the_sum_of_the_numbers_in_the_question() -> None:
    for question in arithmetic.questions(count=50, seed=3):
        first, second = question.text.removeprefix("What is ").removesuffix("?").split(" + ")
        assert question.result == int(first) + int(second)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" 3 + 4 = 7\n#### 7\n\nQuestion: What is 5 + 5?\nAnswer: 10\n#### 10", 7, 7),
        (" 3 + 4 = 7\n#### 8", 8, 8),
        ("#### 1,234", 1234, 1234),
        ("#### -3", -3, -3),
        ("#### 7\n#### 9", 7, 9),
        ("the answer is 7.", None, 7),
        ("####7", None, 7),
        ("seven", None, None),
        ("", None, None),
    ],
)
def test_the_final_number_is_taken_by_strict_match_and_by_flexible_extract(
    text: str, strict: int | None, flexible: int | None
) -> None:
    assert (arithmetic.strict_match(text), arithmetic.flexible_extract(text)) == (strict, flexible)


def test_right_answers_are_counted_against_the_right_results() -> None:
    assert [score.right for score in (RIGHT, HALF, NONE)] == [2, 1, 0]
    assert scored("it is 7", "50").right == 0
    assert scored("it is 7", "50").right_flexible == 2


def test_a_server_that_adds_one_digit_numbers_only_is_right_in_half_of_the_questions() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)["prompt"].rsplit("What is ", 1)[1].split("?")[0]
        first, second = map(int, asked.split(" + "))
        text = f" {asked}\n#### {first + second if first < 10 else 0}\n\nQuestion: What is 1 + 1?\nAnswer: #### 2"
        choice = {"text": text, "token_ids": [1], "logprobs": {"token_logprobs": [-0.1]}}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 9}})

    async def ask() -> Score:
        async with Client("m", 5, transport=httpx.MockTransport(answer)) as client:
            return await phases.ask_arithmetic(client, "http://d", 8)

    score = asyncio.run(ask())
    assert (score.right, score.right_flexible, score.errors) == (16, 16, ())


def test_equal_answers_pass_and_the_table_shows_the_score() -> None:
    check = checks.judge_arithmetic(HALF, HALF, None)
    assert status(check) == 0
    assert "1 of 2" in check.detail


@pytest.mark.parametrize(
    ("one_engine", "router"),
    [
        (HALF, RIGHT),
        (RIGHT, HALF),
        (HALF, scored("#### 9", "#### 50")),
        (HALF, scored("#### 7", "#### 52")),
        (HALF, scored("#### 7", "it is 51")),
        (NONE, NONE),
    ],
    ids=["higher", "lower", "same score, other questions", "wrong otherwise", "without the mark", "zero"],
)
def test_where_answers_must_be_equal_another_answer_or_a_score_of_zero_fails_the_run(
    one_engine: Score, router: Score
) -> None:
    assert status(checks.judge_arithmetic(one_engine, router, None)) == 1


def test_a_model_of_random_weights_may_score_zero_but_must_answer_alike() -> None:
    assert status(checks.judge_arithmetic(NONE, NONE, None, random_weights=True)) == 0
    other = scored("#### 9", "#### 51")
    assert status(checks.judge_arithmetic(NONE, other, None, random_weights=True)) == 1


def test_a_failed_request_fails_the_run_and_its_error_is_shown() -> None:
    broken = arithmetic.score([SEVEN, FIFTY], [Answer(text="#### 7"), Answer(error="HTTP 500: gone")])
    for itself in (None, HALF):
        check = checks.judge_arithmetic(HALF, broken, itself)
        assert status(check) == 1
        assert "HTTP 500: gone" in check.detail


def many(right: int, *, of: int = 32) -> Score:
    return Score((1,) * right + (0,) * (of - right), (1,) * right + (0,) * (of - right), (1,) * of)


@pytest.mark.parametrize(
    ("router", "itself", "expected"), [(20, 20, 0), (19, 20, 0), (18, 20, 1), (17, 17, 0), (16, 17, 1), (0, 0, 1)]
)
def test_without_exactness_the_score_may_differ_by_as_many_answers_as_one_engine_changes_itself(
    router: int, itself: int, expected: int
) -> None:
    """One question of 32, as gsm8k's 0.03 would allow, where the engine answers itself alike."""
    assert status(checks.judge_arithmetic(many(20), many(router), many(itself))) == expected
