"""Scores: arithmetic questions, how the final number is taken, what fails."""

from __future__ import annotations

import pytest

from scripts.accuracy import checks, scores
from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case
from scripts.accuracy.scores import Question

SEVEN, FIFTY = (
    Question("What is 3 + 4?", "3 + 4 = 7", 7),
    Question("What is 20 + 30?", "20 + 30 = 50", 50),
)


def test_the_same_seed_gives_the_same_questions_and_no_question_is_an_example() -> None:
    asked = scores.questions()
    assert asked == scores.questions() != scores.questions(seed=15)
    assert len({question.text for question in asked}) == scores.QUESTIONS == 32
    for question, case in zip(asked, scores.cases(asked), strict=True):
        assert isinstance(case.prompt, str)
        assert case.prompt.count(question.text) == 1
        assert case.prompt.endswith(f"Question: {question.text}\nAnswer:")
        assert case.prompt.count("#### ") == 6
        first, second = (
            question.text.removeprefix("What is ").removesuffix("?").split(" + ")
        )
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
def test_the_final_number_is_taken_by_strict_match(
    text: str, number: int | None
) -> None:
    assert scores.final_number(text) == number


SUMS = [Case("seven", "3 + 4", max_tokens=1), Case("fifty", "20 + 30", max_tokens=1)]


def answers(*texts: str) -> list[Answer]:
    """Of one token each, the number."""
    return [Answer((int(text.split()[-1]),), (-0.1,), text=text) for text in texts]


@pytest.mark.parametrize(
    ("one_engine", "router", "random_weights", "passed"),
    [
        (("#### 7", "it is 51"), ("#### 7", "it is 51"), False, True),
        (("#### 7", "it is 51"), ("#### 7", "#### 50"), False, False),
        (("#### 8", "it is 51"), ("#### 8", "it is 51"), False, False),
        (("#### 8", "it is 51"), ("#### 8", "it is 51"), True, True),
        (("#### 8", "it is 51"), ("#### 9", "it is 51"), True, False),
    ],
    ids=[
        "equal",
        "one answer differs",
        "a score of zero",
        "random weights",
        "random weights, one differs",
    ],
)
def test_another_answer_or_a_score_of_zero_fails(
    one_engine: tuple[str, str],
    router: tuple[str, str],
    random_weights: bool,
    passed: bool,
) -> None:
    expected, found = (answers(*texts) for texts in (one_engine, router))
    compared = checks.compare(SUMS, {"seven": expected[0], "fifty": expected[1]}, found)
    right = scores.right([SEVEN, FIFTY], expected), scores.right([SEVEN, FIFTY], found)
    assert (
        checks.judge_arithmetic(
            compared, right, "float32", random_weights=random_weights
        ).passed
        is passed
    )
