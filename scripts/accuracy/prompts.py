"""The prompts: a running text cut to exact numbers of tokens, at every length that matters to blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_WHO = "The engineer|My grandmother|A young sailor|The old clockmaker|Our teacher|A quiet baker|The mayor|Her brother"
_DID = (
    "built|carried|repaired|forgot|painted|discovered|sold|borrowed|described|measured"
)
_WHAT = "a wooden bridge|the brass telescope|seven letters|an unusual map|the village bell|a boat|two lanterns"
_WHERE = "beside the river|in the harbour|under the mountain|at the market|near the lighthouse|behind the mill"
_WHY = "because winter was coming|to win a wager|although nobody asked|before the guests arrived|for the festival"


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        prompt: token ids or a text.
        messages: of a chat, as (role, content); then there is no prompt.
        hit_blocks: full blocks that the decoder has from earlier cases of the sequence; None when not foreseen.
    """

    name: str
    prompt: tuple[int, ...] | str = ()
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int = 8
    stream: bool = False
    hit_blocks: int | None = 0

    @property
    def chat(self) -> bool:
        """Whether it goes to the chat endpoint."""
        return bool(self.messages)


@dataclass(frozen=True, slots=True)
class CaseSet:
    """All requests of a run.

    Attributes:
        sequence: one after another.
        crowd: many at once.
        aborted: cut off half way, then asked again.
        poisoned: answered from an overwritten cache.
        warm: asked first and not compared.
    """

    sequence: tuple[Case, ...]
    crowd: tuple[Case, ...]
    aborted: tuple[Case, ...]
    poisoned: tuple[Case, ...]
    warm: tuple[Case, ...]

    @property
    def compared(self) -> tuple[Case, ...]:
        """Everything that the single engine answers too."""
        return self.sequence + self.crowd + self.aborted + self.poisoned


def running_text(sentences: int, seed: int = 7) -> str:
    """A text without end in plain English, the same for the same seed."""
    rng = random.Random(seed)
    parts = [part.split("|") for part in (_WHO, _DID, _WHAT, _WHERE, _WHY)]
    return " ".join(
        f"{who} {did} {what} {where} {why}."
        for who, did, what, where, why in (
            [rng.choice(part) for part in parts] for _ in range(sentences)
        )
    )


class Cutter:
    """Cuts token ids out of the running text; no two cuts begin alike, so none shares a block by chance."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._position = 0

    def cut(self, length: int) -> tuple[int, ...]:
        """The next `length` tokens.

        Raises:
            ValueError: the text is too short.
        """
        start = self._position
        if start + length > len(self._tokens):
            raise ValueError(
                f"the running text has {len(self._tokens)} tokens; {start + length} are needed"
            )
        self._position = start + length
        return tuple(self._tokens[start : start + length])


def lengths(block: int, longest: int, shortest: int = 1) -> list[int]:
    """Lengths in tokens around every border: one token, one block ± 1, several blocks ± 1, up to the longest.

    Example: `lengths(128, 1500)` has 1, 127, 128, 129, 255, 256, 257, …, 1500.
    """
    wanted = {1, 2, 3, 17, 50, longest, longest // 2, longest // 3}
    wanted |= {block * count + more for count in (1, 2, 3, 4) for more in (-1, 0, 1)}
    return sorted(length for length in wanted if shortest <= length <= longest)


def make_cases(
    tokens: Sequence[int], block: int, longest: int, crowd: int, shortest: int = 1
) -> CaseSet:
    """All cases for a decoder with blocks of `block` tokens.

    Args:
        tokens: the running text as token ids.
        longest: tokens of the longest prompt.
        crowd: how many requests go at once.
        shortest: tokens of the shortest prompt.

    Raises:
        ValueError: the text is too short.
    """
    cutter = Cutter(tokens)
    warm = tuple(Case(f"warm {number}", cutter.cut(40 + number)) for number in range(4))
    sequence = [
        Case(f"{length} tokens", cutter.cut(length), stream=index % 3 == 2)
        for index, length in enumerate(lengths(block, longest, shortest))
    ]
    sequence += _shared_prefixes(cutter, block)
    sequence += _texts()
    sequence += _chats()
    middle = min(2 * block + 40, longest // 2)
    return CaseSet(
        sequence=tuple(sequence),
        crowd=tuple(
            Case(
                f"crowd {number}",
                cutter.cut(20 + (number * 61) % middle),
                stream=number % 2 == 1,
                hit_blocks=0,
            )
            for number in range(2 * crowd)
        ),
        aborted=tuple(
            Case(f"abort {number}", cutter.cut(middle + number), stream=True)
            for number in range(4)
        ),
        poisoned=tuple(
            Case(f"poison {number}", cutter.cut(middle + number)) for number in range(4)
        ),
        warm=warm,
    )


def _shared_prefixes(cutter: Cutter, block: int) -> list[Case]:
    """Hits on the decoder: the whole prompt, a part of it, and an earlier prompt as the beginning of a longer one.

    vLLM never takes the last token from its cache, so a repeated prompt of exactly n blocks hits n − 1 of them.
    """
    base = cutter.cut(2 * block)
    ragged = cutter.cut(block + block // 2)
    return [
        Case("prefix of 2 blocks", base),
        Case("2 blocks again", base, hit_blocks=1),
        Case("2 blocks again, streamed", base, hit_blocks=1, stream=True),
        Case("2 blocks and 1 token", (*base, *cutter.cut(1)), hit_blocks=2),
        Case("2 blocks and a tail", (*base, *cutter.cut(block // 3)), hit_blocks=2),
        Case("2 blocks and a block", (*base, *cutter.cut(block)), hit_blocks=2),
        Case(
            "first block and a tail",
            (*base[:block], *cutter.cut(block // 2 + 3)),
            hit_blocks=1,
        ),
        Case(
            "half a block and a tail",
            (*base[: block // 2], *cutter.cut(block)),
            hit_blocks=0,
        ),
        Case("block and a half", ragged),
        Case("block and a half again", ragged, hit_blocks=1),
        Case("block and a half, longer", (*ragged, *cutter.cut(block)), hit_blocks=1),
    ]


def _texts() -> list[Case]:
    prompts = (
        "The capital of France is",
        "Water boils at a temperature of",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a small village by the sea,",
        "1, 2, 3, 4, 5,",
        "Ein kurzer Satz mit Umlauten: über, für, Größe.",
    )
    return [
        Case(
            f"text {number}",
            prompt,
            max_tokens=12,
            stream=number % 2 == 1,
            hit_blocks=None,
        )
        for number, prompt in enumerate(prompts)
    ]


def _chats() -> list[Case]:
    questions = (
        "Name three colours.",
        "What is the sum of 17 and 25?",
        "Write one sentence about the sea.",
        "Translate 'good morning' into French.",
        "Summarise this: " + running_text(14, seed=3),
    )
    cases = [
        Case(
            f"chat {number}",
            messages=(("user", question),),
            max_tokens=12,
            stream=number % 2 == 0,
            hit_blocks=None,
        )
        for number, question in enumerate(questions)
    ]
    turns = (
        ("user", questions[-1]),
        ("assistant", "Many people built many things."),
        ("user", "Shorter, please."),
    )
    return [
        *cases,
        Case("chat, second turn", messages=turns, max_tokens=12, hit_blocks=None),
    ]
