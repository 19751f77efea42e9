"""From what the phases saw to checks and figures: which of them are compared with what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from scripts.accuracy import checks
from scripts.accuracy.arithmetic import Score, score
from scripts.accuracy.checks import Check, Comparison, Formula
from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.model import CacheShape
from scripts.accuracy.phases import Asked
from scripts.accuracy.prompts import Case, CaseSet
from scripts.accuracy.report import milliseconds
from scripts.accuracy.settings import Settings


@dataclass(slots=True)
class Expected:
    """The single engine's answers.

    Attributes:
        itself: one at a time against many at once; None where answers must be equal.
        arithmetic: its score; arithmetic_itself: its score when asked again, None where answers must be equal.
        block: tokens in a block; prefill_block: of the prefill engines.
        staged: whether decoders read anything into a staging pool.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    itself: Comparison | None = None
    gsm8k: float | None = None
    arithmetic: Score = field(default_factory=lambda: score((), ()))
    arithmetic_itself: Score | None = None
    block: int = 0
    prefill_block: int = 0
    staged: bool = False

    def of(self, cases: Sequence[Case]) -> list[Answer]:
        """Its answers to these cases."""
        return [self.answers[case.name] for case in cases]


@dataclass(frozen=True, slots=True)
class ThroughTheRouter:
    """All that came back through the router.

    Attributes:
        again: answers to prompts whose first stream was closed after `came` tokens.
    """

    cases: CaseSet
    one_by_one: Asked
    crowd: Asked
    again: Sequence[Answer]
    came: tuple[int, ...]

    def compared(self, expected: Expected) -> Comparison:
        """Every answer against the single engine's."""
        asked = [*self.cases.sequence, *self.cases.crowd, *self.cases.aborted]
        found = [*self.one_by_one.answers, *self.crowd.answers, *self.again]
        return checks.compare(asked, expected.of(asked), found)


def judge_answers(seen: ThroughTheRouter, expected: Expected) -> list[Check]:
    """Tokens and log-probabilities, also after streams that were closed half way."""
    aborted = checks.compare(seen.cases.aborted, expected.of(seen.cases.aborted), seen.again)
    detail = f"{len(seen.came)} streams closed after {', '.join(map(str, seen.came))} tokens, then asked again: "
    if expected.itself is None:
        right, detail = not aborted.differences, f"{detail}{len(aborted.differences)} differ"
    else:
        right, detail = all(not answer.error for answer in seen.again), f"{detail}all answered"
    return [*checks.judge_tokens(seen.compared(expected), expected.itself), Check("right after aborts", right, detail)]


def formula_of(expected: Expected, settings: Settings, shape: CacheShape | None) -> Formula | None:
    """The formula for the model's cache, where there is one."""
    if shape is None:
        return None
    unit = math.gcd(expected.block, expected.prefill_block or expected.block)
    more = None
    if expected.staged:
        # Every decode worker may read whole blocks of its producers.
        most = replace(shape, kv_heads=max(shape.kv_heads, settings.prefill_tp) * settings.decode_tp)
        more = Formula(
            max(unit, expected.prefill_block), most.token_bytes(settings.dtype), most.formula(settings.dtype)
        )
    return Formula(unit, shape.token_bytes(settings.dtype), shape.formula(settings.dtype), more)


def judge_counters(
    seen: ThroughTheRouter, expected: Expected, settings: Settings, shape: CacheShape | None
) -> list[Check]:
    """Bytes, prefix hits, and prompt tokens computed on the decoder."""
    formula = formula_of(expected, settings, shape)
    one_by_one, crowd = seen.one_by_one, seen.crowd
    found = checks.judge_bytes(one_by_one.seen, formula, settings.ferry)
    found.append(checks.judge_crowd_bytes(crowd.answers, crowd.seen["all at once"], formula, settings.ferry))
    if settings.decode_instances == settings.decode_dp == 1:
        found.append(checks.judge_hits(seen.cases.sequence, one_by_one.seen, expected.block))
    computed = one_by_one.computed + crowd.computed
    prompts = len(one_by_one.cases) + len(crowd.cases)
    return [*found, checks.judge_computed(prompts, computed.requests, computed.tokens)]


def _blocks(expected: Expected) -> str:
    same = expected.prefill_block in (0, expected.block)
    return str(expected.block) if same else f"{expected.prefill_block} → {expected.block}"


def quantiles(values: Iterable[float]) -> str:
    """p50 and p99 of times in seconds."""
    times = list(values)
    return milliseconds({"p50": checks.percentile(times, 0.5), "p99": checks.percentile(times, 0.99)})


def figures(
    seen: ThroughTheRouter, expected: Expected, settings: Settings, shape: CacheShape | None, counters: Scrape
) -> dict[str, str]:
    """Figures that are shown and not judged."""
    comparison = seen.compared(expected)
    lengths = [one.prompt_tokens for one in seen.one_by_one.seen.values()]
    found = {
        "prompts · tokens compared": f"{comparison.prompts} · {comparison.tokens}",
        "prompt lengths": f"{min(lengths)} … {max(lengths)} tokens, blocks of {_blocks(expected)}",
        "formula": str(formula_of(expected, settings, shape) or "none for this model"),
    }
    streamed = [case for case in seen.cases.sequence if case.stream]
    ours = {case.name: answer for case, answer in zip(seen.one_by_one.cases, seen.one_by_one.answers, strict=True)}
    sides = {"router": [ours[case.name] for case in streamed], "one engine": expected.of(streamed)}
    for side, answers in sides.items():
        times = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
        found[f"time to first token, {side}"] = f"{quantiles(times)} ({len(times)} streams)"
    if settings.ferry:
        name = "vllm:kvferry_handover_seconds"
        estimates = {"p50": counters.quantile(name, 0.5), "p99": counters.quantile(name, 0.99)}
        loads = counters.total(f"{name}_count")
        found["handover inside the decoder"] = (
            f"{milliseconds(estimates)} from arrival to loaded ({loads:.0f} prompts; estimated from a histogram)"
        )
    return found
