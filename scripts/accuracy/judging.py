"""From what the phases saw to checks and figures: which answers and counters are compared with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.accuracy import checks
from scripts.accuracy.checks import Check, Formula, Seen
from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.prompts import CaseSet
from scripts.accuracy.settings import Settings

Expected = Mapping[str, Answer]
"""The single engine's answers, by the case's name."""


@dataclass(frozen=True, slots=True)
class ThroughTheRouter:
    """All that came back through the router.

    Attributes:
        answers: to the cases of the sequence and to those of the crowd.
        again: answers to prompts whose first stream was closed after `came` tokens.
        left: the decoders' counters of these streams: the lease of one may have ended before its load began.
        seen: by the decoders' counters, by the case's name; of the crowd together.
        computed: requests and prompt tokens that the decoders computed.
    """

    answers: Sequence[Answer]
    again: Sequence[Answer]
    came: Sequence[int]
    left: Scrape
    seen: Mapping[str, Seen]
    computed: tuple[int, int]


def judge_router(
    expected: Expected,
    found: ThroughTheRouter,
    cases: CaseSet,
    settings: Settings,
    formula: Formula | None,
    blocks: tuple[int, int],
) -> tuple[list[Check], dict[str, str]]:
    """The checks, and the figures that are shown and not judged.

    Args:
        blocks: tokens in a block of the prefill engines and of the decode engines.
    """
    asked = [*cases.sequence, *cases.crowd]
    every = [*asked, *cases.aborted]
    compared = checks.compare(every, expected, [*found.answers, *found.again])
    judged = [
        *checks.judge_tokens(compared, settings.dtype),
        _judge_aborts(expected, found, cases, settings.dtype),
        checks.judge_bytes(found.seen, formula, settings.ferry),
    ]
    if settings.decode_instances == settings.decode_dp == 1 and formula is not None:
        judged.append(checks.judge_hits(cases.sequence, found.seen, blocks[1]))
    judged.append(checks.judge_computed(len(asked), *found.computed))
    lengths = [tokens for one in found.seen.values() for tokens in one.prompts]
    of_blocks = (
        f"{blocks[0]} → {blocks[1]}" if blocks[0] != blocks[1] else f"{blocks[1]}"
    )
    return judged, {
        "prompts · tokens compared": f"{compared.prompts} · {compared.tokens}",
        "prompt lengths": f"{min(lengths)} … {max(lengths)} tokens, blocks of {of_blocks}",
        "formula": str(formula or "none for this model"),
    }


def _judge_aborts(
    expected: Expected, found: ThroughTheRouter, cases: CaseSet, dtype: str
) -> Check:
    """The same prompts are answered rightly after streams that were closed half way."""
    compared = checks.compare(cases.aborted, expected, found.again)
    closed = f"{len(found.came)} streams closed after {', '.join(map(str, found.came))} tokens, then asked again"
    return Check(
        "right after aborts",
        compared.agrees(dtype),
        f"{closed}: {len(compared.differences)} differ",
    )
