"""From what the phases saw to checks and figures: which answers and counters are compared with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.accuracy import checks
from scripts.accuracy.checks import Check, Comparison, Formula, Seen
from scripts.accuracy.client import Answer
from scripts.accuracy.prompts import Case, CaseSet
from scripts.accuracy.scores import Score
from scripts.accuracy.settings import Settings


@dataclass(slots=True)
class Expected:
    """The single engine's answers.

    Attributes:
        itself: one at a time against many at once; None where answers must be equal.
        arithmetic: its score; arithmetic_itself: its score when asked again, None where answers must be equal.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    itself: Comparison | None = None
    arithmetic: Score = field(default_factory=lambda: Score((), ()))
    arithmetic_itself: Score | None = None

    def of(self, cases: Sequence[Case]) -> list[Answer]:
        """Its answers to these cases."""
        return [self.answers[case.name] for case in cases]


@dataclass(frozen=True, slots=True)
class ThroughTheRouter:
    """All that came back through the router.

    Attributes:
        answers: to the cases of the sequence and to those of the crowd.
        again: answers to prompts whose first stream was closed after `came` tokens.
        seen: by the decoders' counters, by the case's name; of the crowd together.
        computed: requests and prompt tokens that the decoders computed.
    """

    answers: Sequence[Answer]
    again: Sequence[Answer]
    came: Sequence[int]
    seen: Mapping[str, Seen]
    computed: tuple[int, int]


def judge_router(
    expected: Expected,
    found: ThroughTheRouter,
    cases: CaseSet,
    settings: Settings,
    formula: Formula | None,
    blocks: tuple[int, int],
    tolerance: float = 0.0,
) -> tuple[list[Check], dict[str, str]]:
    """The checks, and the figures that are shown and not judged.

    Args:
        blocks: tokens in a block of the prefill engines and of the decode engines.
        tolerance: see `judge_tokens`.
    """
    asked = [*cases.sequence, *cases.crowd]
    every = [*asked, *cases.aborted]
    compared = checks.compare(every, expected.of(every), [*found.answers, *found.again])
    judged = [
        *checks.judge_tokens(compared, expected.itself, tolerance),
        _judge_aborts(expected, found, cases),
        checks.judge_bytes(found.seen, formula, settings.ferry),
    ]
    if settings.decode_instances == settings.decode_dp == 1 and formula is not None:
        judged.append(checks.judge_hits(cases.sequence, found.seen, blocks[1]))
    judged.append(checks.judge_computed(len(asked), *found.computed))
    lengths = [tokens for one in found.seen.values() for tokens in one.prompts]
    of_blocks = f"{blocks[0]} → {blocks[1]}" if blocks[0] != blocks[1] else f"{blocks[1]}"
    return judged, {
        "prompts · tokens compared": f"{compared.prompts} · {compared.tokens}",
        "prompt lengths": f"{min(lengths)} … {max(lengths)} tokens, blocks of {of_blocks}",
        "formula": str(formula or "none for this model"),
    }


def _judge_aborts(expected: Expected, found: ThroughTheRouter, cases: CaseSet) -> Check:
    """The same prompts are answered rightly after streams that were closed half way."""
    detail = f"{len(found.came)} streams closed after {', '.join(map(str, found.came))} tokens, then asked again: "
    if expected.itself is None:
        differences = checks.compare(cases.aborted, expected.of(cases.aborted), found.again).differences
        right, detail = not differences, f"{detail}{len(differences)} differ"
    else:
        failed = sum(bool(answer.error) for answer in found.again)
        right, detail = not failed, f"{detail}{failed} failed"
    return Check("right after aborts", right, detail)
