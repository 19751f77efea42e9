"""From what the phases saw to checks and figures: which answers and counters are compared with what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scripts.accuracy import checks
from scripts.accuracy.checks import Check, Comparison, Formula
from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.model import CacheShape
from scripts.accuracy.phases import Asked
from scripts.accuracy.prompts import Case, CaseSet
from scripts.accuracy.report import milliseconds, quantiles
from scripts.accuracy.scores import Score
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
    gsm8k: float = 0.0
    arithmetic: Score = field(default_factory=lambda: Score((), ()))
    arithmetic_itself: Score | None = None
    block: int = 0
    prefill_block: int = 0
    staged: bool = False

    def of(self, cases: Sequence[Case]) -> list[Answer]:
        """Its answers to these cases."""
        return [self.answers[case.name] for case in cases]


@dataclass(frozen=True, slots=True)
class ThroughTheRouter:
    """All that came back through the router, and what was expected.

    Attributes:
        again: answers to prompts whose first stream was closed after `came` tokens.
    """

    expected: Expected
    settings: Settings
    formula: Formula | None
    cases: CaseSet
    one_by_one: Asked
    crowd: Asked
    again: Sequence[Answer]
    came: Sequence[int]

    @property
    def compared(self) -> Comparison:
        """Every answer against the single engine's."""
        asked = [*self.cases.sequence, *self.cases.crowd, *self.cases.aborted]
        found = [*self.one_by_one.answers, *self.crowd.answers, *self.again]
        return checks.compare(asked, self.expected.of(asked), found)

    def judge_answers(self) -> list[Check]:
        """Tokens and log-probabilities, also after streams that were closed half way."""
        aborted = checks.compare(self.cases.aborted, self.expected.of(self.cases.aborted), self.again)
        detail = f"{len(self.came)} streams closed after {', '.join(map(str, self.came))} tokens, then asked again: "
        if self.expected.itself is None:
            right, detail = not aborted.differences, f"{detail}{len(aborted.differences)} differ"
        else:
            right, detail = all(not answer.error for answer in self.again), f"{detail}all answered"
        return [*checks.judge_tokens(self.compared, self.expected.itself), Check("right after aborts", right, detail)]

    def judge_counters(self) -> list[Check]:
        """Bytes, prefix hits, and prompt tokens computed on the decoder."""
        one_by_one, crowd, ferry = self.one_by_one, self.crowd, self.settings.ferry
        found = [
            checks.judge_bytes(one_by_one.seen, self.formula, ferry),
            checks.judge_crowd_bytes(crowd.answers, crowd.seen["all at once"], self.formula, ferry),
        ]
        if self.settings.decode_instances == self.settings.decode_dp == 1:
            found.append(checks.judge_hits(self.cases.sequence, one_by_one.seen, self.expected.block))
        requests, tokens = (sum(both) for both in zip(one_by_one.computed, crowd.computed, strict=True))
        return [*found, checks.judge_computed(len(one_by_one.cases) + len(crowd.cases), requests, tokens)]

    def figures(self, counters: Scrape) -> dict[str, str]:
        """Figures that are shown and not judged."""
        block, prefill_block = self.expected.block, self.expected.prefill_block
        lengths = [one.prompt_tokens for one in self.one_by_one.seen.values()]
        blocks = f"{block}" if prefill_block in (0, block) else f"{prefill_block} → {block}"
        compared = self.compared
        found = {
            "prompts · tokens compared": f"{compared.prompts} · {compared.tokens}",
            "prompt lengths": f"{min(lengths)} … {max(lengths)} tokens, blocks of {blocks}",
            "formula": str(self.formula or "none for this model"),
        }
        streamed = [case for case in self.cases.sequence if case.stream]
        ours = {case.name: answer for case, answer in zip(self.one_by_one.cases, self.one_by_one.answers, strict=True)}
        sides = {"router": [ours[case.name] for case in streamed], "one engine": self.expected.of(streamed)}
        for side, answers in sides.items():
            times = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
            found[f"time to first token, {side}"] = f"{quantiles(times)} ({len(times)} streams)"
        if self.settings.ferry:
            name = "vllm:kvferry_handover_seconds"
            estimates = milliseconds({f"p{share:.0f}": counters.quantile(name, share / 100) for share in (50, 99)})
            loads = f"{counters.total(f'{name}_count'):.0f} prompts; estimated from a histogram"
            found["handover inside the decoder"] = f"{estimates} from arrival to loaded ({loads})"
        return found


def formula_of(expected: Expected, settings: Settings, shape: CacheShape | None) -> Formula | None:
    """The formula for the bytes of the model's cache, where there is one."""
    if shape is None:
        return None
    unit = math.gcd(expected.block, expected.prefill_block or expected.block)
    more = None
    if expected.staged:
        # Every decode worker may read whole blocks of its producers.
        most = replace(shape, kv_heads=max(shape.kv_heads, settings.prefill_tp) * settings.decode_tp)
        block = max(unit, expected.prefill_block)
        more = Formula(block, most.token_bytes(settings.dtype), most.formula(settings.dtype))
    return Formula(unit, shape.token_bytes(settings.dtype), shape.formula(settings.dtype), more)
