"""Arithmetic questions and their scorer: the same kind of task as gsm8k, with no hub and in seconds.

Questions come from a seed. The prompt has worked examples in gsm8k's form, ending in `#### 7`. Two filters take the
final number, as lm-eval's gsm8k task has them: strict match takes the number after the first `#### `, flexible extract
the last number in the text. The score is the share of right answers by strict match.
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
_NUMBER = re.compile(r"-?[0-9][0-9,]*")
_NEXT_QUESTION = "Question:"


@dataclass(frozen=True, slots=True)
class Question:
    """A sum: `text` asks for it, `worked` is its equation, `result` the right number."""

    text: str
    worked: str
    result: int

    @property
    def example(self) -> str:
        """The question with its worked answer."""
        return f"{_NEXT_QUESTION} {self.text}\nAnswer: {self.worked}\n#### {self.result}\n\n"


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
        found[pair] = Question(f"What is {pair[0]} + {pair[1]}?", f"{pair[0]} + {pair[1]} = {sum(pair)}", sum(pair))
    return list(found.values())


def cases(asked: Sequence[Question]) -> list[Case]:
    """One prompt a question, all with the same examples, none of which is asked."""
    texts = {question.text for question in asked}
    examples = [one for one in questions(_EXAMPLES + len(asked), seed=5) if one.text not in texts][:_EXAMPLES]
    shots = "".join(example.example for example in examples)
    return [
        Case(f"arithmetic {number}", f"{shots}{_NEXT_QUESTION} {question.text}\nAnswer:", max_tokens=_MAX_TOKENS)
        for number, question in enumerate(asked)
    ]


def strict_match(text: str) -> int | None:
    """The number after the first `#### ` of the answer; None without one."""
    found = _STRICT.search(_until_next(text))
    return _value(found[1]) if found else None


def flexible_extract(text: str) -> int | None:
    """The last number of the answer; None without one."""
    found = _NUMBER.findall(_until_next(text))
    return _value(found[-1]) if found else None


@dataclass(frozen=True, slots=True)
class Score:
    """One server's answers to the questions.

    Attributes:
        strict: the number that each answer gave by strict match, flexible: by flexible extract; None for no number.
        wanted: the right ones.
        errors: of requests that failed.
    """

    strict: tuple[int | None, ...]
    flexible: tuple[int | None, ...]
    wanted: tuple[int, ...]
    errors: tuple[str, ...] = ()

    @property
    def right(self) -> int:
        """Right answers by strict match."""
        return _equal(self.strict, self.wanted)

    @property
    def right_flexible(self) -> int:
        """Right answers by flexible extract."""
        return _equal(self.flexible, self.wanted)

    def changed(self, other: Score) -> int:
        """Questions to which the two gave another number, right or wrong, by either filter."""
        ours, theirs = zip(self.strict, self.flexible, strict=True), zip(other.strict, other.flexible, strict=True)
        return sum(a != b for a, b in zip(ours, theirs, strict=True))


def score(asked: Sequence[Question], answers: Sequence[Answer]) -> Score:
    """Score one server's answers; a request that failed gave no number."""
    return Score(
        strict=tuple(strict_match(answer.text) for answer in answers),
        flexible=tuple(flexible_extract(answer.text) for answer in answers),
        wanted=tuple(question.result for question in asked),
        errors=tuple(answer.error for answer in answers if answer.error),
    )


def _until_next(text: str) -> str:
    """The answer without the further questions that a model makes up."""
    return text.split(_NEXT_QUESTION, 1)[0]


def _value(text: str) -> int:
    return int(text.replace(",", ""))


def _equal(found: Sequence[int | None], wanted: Sequence[int]) -> int:
    return sum(number == right for number, right in zip(found, wanted, strict=True))
