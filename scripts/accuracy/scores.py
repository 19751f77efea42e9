"""Scores of a server: arithmetic questions, which need no hub.

They come from a seed. The prompt has worked examples in the form of gsm8k, ending in `#### 7`, and the final number is
taken as by the strict match of lm-eval's gsm8k task: after the first `#### `.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case

QUESTIONS = 32
_EXAMPLES = 6
_MAX_TOKENS = 20
_STRICT = re.compile(r"#### (-?[0-9][0-9,]*)")
_NEXT_QUESTION = "Question:"


@dataclass(frozen=True, slots=True)
class Question:
    """A sum: `text` asks for it, `worked` is its equation, `result` the right number."""

    text: str
    worked: str
    result: int


def questions(count: int = QUESTIONS, seed: int = 14) -> list[Question]:
    """Sums in turn of two one-digit numbers, which a small model knows, and of two two-digit ones, which it often does
    not: a score between 0 and 1 tells two engines apart. No question comes twice.

    Example: `What is 3 + 4?`, worked as `3 + 4 = 7`.
    """
    rng = random.Random(seed)
    found: dict[tuple[int, int], Question] = {}
    while len(found) < count:
        low, high = ((1, 9), (11, 89))[len(found) % 2]
        pair = rng.randint(low, high), rng.randint(low, high)
        found[pair] = Question(
            f"What is {pair[0]} + {pair[1]}?",
            f"{pair[0]} + {pair[1]} = {sum(pair)}",
            sum(pair),
        )
    return list(found.values())


def cases(asked: Sequence[Question]) -> list[Case]:
    """One prompt a question, all with the same examples, none of which is asked."""
    examples = [
        one for one in questions(_EXAMPLES + len(asked), seed=5) if one not in asked
    ][:_EXAMPLES]
    shots = "".join(
        f"{_NEXT_QUESTION} {one.text}\nAnswer: {one.worked}\n#### {one.result}\n\n"
        for one in examples
    )
    return [
        Case(
            f"arithmetic {number}",
            f"{shots}{_NEXT_QUESTION} {question.text}\nAnswer:",
            max_tokens=_MAX_TOKENS,
        )
        for number, question in enumerate(asked)
    ]


def final_number(text: str) -> int | None:
    """The number of an answer; None without one. Further questions, which a model makes up, do not count."""
    found = _STRICT.search(text.split(_NEXT_QUESTION, 1)[0])
    return int(found[1].replace(",", "")) if found else None


def right(asked: Sequence[Question], answers: Sequence[Answer]) -> int:
    """How many answers are right."""
    return sum(
        final_number(answer.text) == one.result
        for one, answer in zip(asked, answers, strict=True)
    )
