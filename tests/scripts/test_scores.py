"""Scores: arithmetic questions, how the final number is taken, what fails."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from scripts.accuracy import checks, phases, scores
from scripts.accuracy.client import Answer, Client
from scripts.accuracy.scores import Question, Score

SEVEN, FIFTY = Question("What is 3 + 4?", "3 + 4 = 7", 7), Question("What is 20 + 30?", "20 + 30 = 50", 50)


def scored(*texts: str) -> Score:
    return scores.score([SEVEN, FIFTY], [Answer(text=text) for text in texts])


RIGHT, HALF, NONE = scored("#### 7", "#### 50"), scored("#### 7", "#### 51"), scored("#### 8", "#### 51")


def test_the_same_seed_gives_the_same_questions_and_no_question_is_an_example() -> None:
    asked = scores.questions()
    assert asked == scores.questions() != scores.questions(seed=15)
    assert len({question.text for question in asked}) == scores.QUESTIONS == 32
    for question, case in zip(asked, scores.cases(asked), strict=True):
        assert isinstance(case.prompt, str)
        assert case.prompt.count(question.text) == 1
        assert case.prompt.endswith(f"Question: {question.text}\nAnswer:")
        assert case.prompt.count("#### ") == 6
        first, second = question.text.removeprefix("What is ").removesuffix("?").split(" + ")
        assert question.result == int(first) + int(second)
        # A tokenizer that has a token for every digit, sign and blank before a number needs the most.
        marked = f" {question.worked}\n#### {question.result}".replace("####", "#")
        assert len(marked.replace(" +", "+").replace(" =", "=")) <= case.max_tokens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 3 + 4 = 7\n#### 7\n\nQuestion: What is 5 + 5?\nAnswer: 10\n#### 10", 7),
        ("#### 1,234", 1234),
        ("#### -3", -3),
        ("#### 7\n#### 9", 7),
        ("the answer is 7.", None),
        ("\nQuestion: What is 3 + 4?\n#### 7", None),
    ],
)
def test_the_final_number_is_taken_by_strict_match(text: str, number: int | None) -> None:
    assert scores.final_number(text) == number


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
    assert (score.right, score.errors) == (16, ())


OTHER_QUESTIONS, OTHER_WRONG = scored("#### 9", "#### 50"), scored("#### 7", "#### 52")


@pytest.mark.parametrize(
    ("one_engine", "router", "random_weights", "passed"),
    [
        (HALF, HALF, False, True),
        (HALF, RIGHT, False, False),
        (RIGHT, HALF, False, False),
        (HALF, OTHER_QUESTIONS, False, False),
        (HALF, OTHER_WRONG, False, False),
        (HALF, scored("#### 7", "it is 51"), False, False),
        (NONE, NONE, False, False),
        (NONE, NONE, True, True),
        (NONE, scored("#### 9", "#### 51"), True, False),
    ],
    ids=["equal", "higher", "lower", "others", "wrong", "no mark", "zero", "random weights", "random, differs"],
)
def test_where_answers_must_be_equal_another_answer_or_a_score_of_zero_fails(
    one_engine: Score, router: Score, random_weights: bool, passed: bool
) -> None:
    assert checks.judge_arithmetic(one_engine, router, None, random_weights=random_weights).passed is passed


def test_a_failed_request_fails_the_check_and_its_error_is_shown() -> None:
    broken = scores.score([SEVEN, FIFTY], [Answer(text="#### 7"), Answer(error="HTTP 500: gone")])
    for itself in (None, HALF):
        check = checks.judge_arithmetic(HALF, broken, itself)
        assert check.passed is False
        assert "HTTP 500: gone" in check.detail


@pytest.mark.parametrize(
    ("router", "itself", "passed"), [(20, 20, 1), (19, 20, 1), (18, 20, 0), (17, 17, 1), (16, 17, 0), (0, 0, 0)]
)
def test_without_exactness_the_score_may_differ_by_as_many_answers_as_one_engine_changes_itself(
    router: int, itself: int, passed: int
) -> None:
    """One question of 32, as 0.03 would allow, where the engine answers itself alike."""
    one, ours, again = (Score((1,) * right + (0,) * (32 - right), (1,) * 32) for right in (20, router, itself))
    assert checks.judge_arithmetic(one, ours, again).passed is bool(passed)
