"""Scores of a server: arithmetic questions, which need no hub, and gsm8k where `lm-eval` and its questions are at hand.

Arithmetic questions come from a seed. The prompt has worked examples in gsm8k's form, ending in `#### 7`. The final
number is taken as by the strict match of lm-eval's gsm8k task: after the first `#### `.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case
from scripts.accuracy.settings import Settings

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
        found[pair] = Question(f"What is {pair[0]} + {pair[1]}?", f"{pair[0]} + {pair[1]} = {sum(pair)}", sum(pair))
    return list(found.values())


def cases(asked: Sequence[Question]) -> list[Case]:
    """One prompt a question, all with the same examples, none of which is asked."""
    examples = [one for one in questions(_EXAMPLES + len(asked), seed=5) if one not in asked][:_EXAMPLES]
    shots = "".join(f"{_NEXT_QUESTION} {one.text}\nAnswer: {one.worked}\n#### {one.result}\n\n" for one in examples)
    return [
        Case(f"arithmetic {number}", f"{shots}{_NEXT_QUESTION} {question.text}\nAnswer:", max_tokens=_MAX_TOKENS)
        for number, question in enumerate(asked)
    ]


def final_number(text: str) -> int | None:
    """The number of an answer; None without one. Further questions, which a model makes up, do not count."""
    found = _STRICT.search(text.split(_NEXT_QUESTION, 1)[0])
    return int(found[1].replace(",", "")) if found else None


@dataclass(frozen=True, slots=True)
class Score:
    """One server's answers to the questions.

    Attributes:
        numbers: of each answer.
        wanted: the right ones.
        errors: of requests that failed, which gave no number.
    """

    numbers: tuple[int | None, ...]
    wanted: tuple[int, ...]
    errors: tuple[str, ...] = ()

    @property
    def right(self) -> int:
        """Right answers."""
        return sum(number == wanted for number, wanted in zip(self.numbers, self.wanted, strict=True))

    def changed(self, other: Score) -> int:
        """Questions to which the two gave another number, right or wrong."""
        return sum(ours != theirs for ours, theirs in zip(self.numbers, other.numbers, strict=True))


def score(asked: Sequence[Question], answers: Sequence[Answer]) -> Score:
    """Score one server's answers."""
    return Score(
        numbers=tuple(final_number(answer.text) for answer in answers),
        wanted=tuple(question.result for question in asked),
        errors=tuple(answer.error for answer in answers if answer.error),
    )


def gsm8k(base_url: str, served_name: str, model: str, settings: Settings, log_dir: Path, name: str) -> float | str:
    """The share of right answers by strict match, at the run's concurrency; or why there is none: switched off, lm-eval
    is not installed, or it failed, for example without a hub that has the questions."""
    if settings.gsm8k == "off":
        return "GSM8K=off"
    if importlib.util.find_spec("lm_eval") is None:
        return "lm-eval is not installed (.venv/bin/pip install 'lm-eval[api]')"
    folder, log_path = log_dir / f"gsm8k-{name}", log_dir / f"gsm8k-{name}.log"
    arguments = (
        f"model={served_name},base_url={base_url}/v1/completions,num_concurrent={settings.concurrency},"
        f"tokenizer={model},tokenized_requests=False,max_retries=1"
    )
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "gsm8k"]
    command += ["--model_args", arguments, "--limit", str(settings.gsm8k_limit), "--output_path", str(folder)]
    with log_path.open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    results = sorted(folder.rglob("results*.json"))
    if done.returncode or not results:
        return f"lm-eval failed with exit status {done.returncode}: {log_path}"
    return float(json.loads(results[-1].read_text())["results"]["gsm8k"]["exact_match,strict-match"])
