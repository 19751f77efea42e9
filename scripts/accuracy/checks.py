"""The checks, computed from recorded answers. Pure: no engine is called here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.prompts import Case
from scripts.accuracy.scores import Score

LOGPROB_TOLERANCE = 1e-3
SCORE_TOLERANCE = 0.03
ROUNDING_TOLERANCE = 0.1
STATES_TOLERANCE = 0.4
"""Of models with states, whose decoder takes the last token of a prompt as a step, where one engine takes it as part of
a chunk: 0.22 was seen of a gated delta net in bfloat16 on a CPU. A wrong state changes nearly all answers."""
BYTES = "bytes moved"
POISON = "poisoned cache changes the tokens"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. `passed` is None for what was not tried; the detail says why, or what was found."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers to the same prompts from two sides.

    Attributes:
        tokens: equal ones.
        differences: the prompts that were answered otherwise, by name, and in which way.
        largest_gap: of log-probabilities, over the tokens before a first difference.
    """

    prompts: int
    tokens: int
    differences: Mapping[str, str]
    largest_gap: float


def compare(cases: Sequence[Case], expected: Sequence[Answer], found: Sequence[Answer]) -> Comparison:
    """Compare token by token. An error on either side is a difference; so is a missing token or log-probability."""
    tokens = 0
    largest = 0.0
    differences: dict[str, str] = {}
    for case, left, right in zip(cases, expected, found, strict=True):
        if left.error or right.error:
            differences[case.name] = left.error or right.error
            continue
        same = equal_tokens(left.tokens, right.tokens)
        tokens += same
        gaps = [abs(a - b) for a, b in zip(left.logprobs[:same], right.logprobs[:same], strict=False)]
        largest = max([largest, *gaps])
        if same < max(len(left.tokens), len(right.tokens), case.max_tokens):
            ours, theirs = right.tokens[same : same + 4], left.tokens[same : same + 4]
            differences[case.name] = f"from token {same} on {ours} instead of {theirs}"
        elif len(gaps) < same:
            differences[case.name] = f"{len(gaps)} log-probabilities for {same} tokens"
    return Comparison(len(cases), tokens, differences, largest)


def ever_different(comparisons: Sequence[Comparison]) -> Comparison:
    """Several comparisons of the same prompts as one: a prompt differs when it differed in any."""
    return Comparison(
        prompts=comparisons[0].prompts,
        tokens=min(each.tokens for each in comparisons),
        differences=dict(item for each in reversed(comparisons) for item in each.differences.items()),
        largest_gap=max(each.largest_gap for each in comparisons),
    )


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def judge_tokens(found: Comparison, itself: Comparison | None, tolerance: float = 0.0) -> list[Check]:
    """Exact in float32; elsewhere no worse than the single engine is against itself.

    Args:
        itself: the single engine, sequential against concurrent; None where equality is demanded.
        tolerance: share of the prompts that may differ beyond those of the single engine.
    """
    shown = "; ".join(f"{name}: {detail}" for name, detail in list(found.differences.items())[:3])
    if itself is None:
        detail = f"{len(found.differences)} of {found.prompts} prompts differ, {found.tokens} tokens are equal"
        gap = f"largest difference {found.largest_gap:.2e}, allowed {LOGPROB_TOLERANCE:.0e}"
        return [
            Check("same tokens as one engine", not found.differences, f"{detail}. {shown}" if shown else detail),
            Check("same log-probabilities", found.largest_gap <= LOGPROB_TOLERANCE, gap),
        ]
    share = len(found.differences) / max(1, found.prompts)
    own = len(itself.differences) / max(1, itself.prompts)
    both = len(found.differences.keys() & itself.differences.keys())
    detail = (
        f"{len(found.differences)} of {found.prompts} prompts differ ({both} of them on one engine too); one engine "
        f"differs from itself, one at a time against many at once, in {len(itself.differences)} of {itself.prompts}"
    )
    detail += f", and {tolerance:.0%} more may" if tolerance else ""
    return [Check("tokens as near as one engine's own", share <= own + tolerance, detail)]


@dataclass(frozen=True, slots=True)
class Seen:
    """The decoders' counters for one prompt, or for several together.

    `prompts`: tokens of each; `local_tokens`: of all, those that the decoder had in its prefix cache.
    """

    prompts: tuple[int, ...]
    local_tokens: int
    nixl_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Formula:
    """Bytes that prompts move: whole blocks beyond the decoder's own hits, all layers, all heads.

    bytes = (Σ ⌈prompt / B⌉ − hit / B) × B × token_bytes

    Attributes:
        block: tokens of a block; of the greatest common divisor where the two sides' blocks differ.
        at_least: they may be more: what is staged may be read in whole blocks of the producer and with heads that are
            not needed.
    """

    block: int
    token_bytes: int
    shape: str
    at_least: bool = False

    def bytes_of(self, prompts: Iterable[int], hit_tokens: int) -> int:
        """For prompts of so many tokens, and the tokens of all that were hits."""
        blocks = sum(math.ceil(tokens / self.block) for tokens in prompts) - hit_tokens // self.block
        return blocks * self.block * self.token_bytes

    def __str__(self) -> str:
        text = f"Σ (⌈prompt/{self.block}⌉ − hit/{self.block}) × {self.block} × {self.token_bytes} B ({self.shape})"
        return f"{text}; staged, at least" if self.at_least else text


def judge_bytes(seen: Mapping[str, Seen], formula: Formula | None, ferry: bool) -> Check:
    """Every prompt moved what the formula says, by the plan and by NIXL's own count."""
    nixl, planned = sum(one.nixl_bytes for one in seen.values()), sum(one.planned_bytes for one in seen.values())
    if formula is None:
        return Check(BYTES, nixl > 0, f"NIXL {nixl:,}, plan {planned:,}; no formula for this model")
    needed = {name: formula.bytes_of(one.prompts, one.local_tokens) for name, one in seen.items()}
    wrong: list[str] = []
    for name, one in seen.items():
        right = one.nixl_bytes >= needed[name] if formula.at_least else one.nixl_bytes == needed[name]
        if not right or (ferry and one.planned_bytes != one.nixl_bytes):
            wrong.append(f"{name}: {one.nixl_bytes:,} instead of {needed[name]:,}, plan {one.planned_bytes:,}")
    detail = f"formula {sum(needed.values()):,}, plan {planned:,}, NIXL {nixl:,}"
    return Check(BYTES, not wrong, "; ".join([detail, *wrong[:3]]))


def judge_hits(cases: Iterable[Case], seen: Mapping[str, Seen], block: int) -> Check:
    """Full and partial prefix hits on the decoder happened where they were meant to."""
    foreseen = [(case, seen[case.name]) for case in cases if case.hit_blocks is not None and case.name in seen]
    wrong = [
        f"{case.name}: {one.local_tokens} tokens instead of {case.hit_blocks} blocks"
        for case, one in foreseen
        if one.local_tokens != (case.hit_blocks or 0) * block
    ]
    hits = sum(bool(case.hit_blocks) for case, _ in foreseen)
    detail = f"{hits} prompts with a hit, {len(foreseen) - hits} without, as foreseen"
    return Check("prefix hits on the decoder", not wrong, "; ".join(wrong[:3]) if wrong else detail)


def judge_computed(prompts: int, requests: int, tokens: int) -> Check:
    """The decoder computed one token of each transferred prompt: the last one, for its logits."""
    detail = f"{tokens} prompt tokens in {requests} requests; {prompts} prompts were transferred"
    return Check("decoder computed 1 token a prompt", prompts == requests == tokens, detail)


def judge_recomputes(counters: Scrape) -> Check:
    """No prompt that came with params was computed on the decoder after all, and no transfer failed."""
    recomputed = counters.by_label("vllm:kvferry_local_recomputes_total", "reason")
    failed = counters.total("vllm:nixl_num_failed_transfers_total")
    reported = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(recomputed.items())) or "none"
    detail = f"prompts computed on the decoder instead: {reported}; failed transfers: {failed:.0f}"
    return Check("nothing was computed twice", not recomputed and not failed, detail)


def judge_streams(counters: Scrape) -> Check:
    """Some bytes were read before the prefill had ended."""
    early, planned = (counters.total(f"vllm:kvferry_{kind}_bytes_total") for kind in ("early", "planned"))
    return Check("read while it is prefilled", early > 0, f"{early / 1e6:.1f} of {planned / 1e6:.1f} MB")


def judge_in_turn(compared: Comparison, moved: int, *, exact: bool) -> Check:
    """One leg after the other: the cache was moved, and tokens are equal, where they must be (`exact`)."""
    others = ", ".join(compared.differences) or "none"
    detail = (
        f"{compared.tokens} tokens of {compared.prompts} prompts are equal, {moved:,} B moved; other prompts: {others}"
    )
    return Check("one leg after the other", moved > 0 and not (exact and compared.differences), detail)


def judge_leases(still_open: int, ways: Mapping[str, float]) -> Check:
    """Every lease of the producers is over. `ways`: how many ended in which way."""
    reported = ", ".join(f"{how} {count:.0f}" for how, count in sorted(ways.items()))
    return Check("leases are over", still_open == 0, f"{still_open} open; {reported}")


def judge_arithmetic(expected: Score, found: Score, itself: Score | None, *, random_weights: bool = False) -> Check:
    """Every answer is equal in float32; elsewhere the scores differ no more than one engine's answers do by themselves.

    A score of 0 fails: it cannot tell two engines apart. A request that failed fails.

    Args:
        itself: the single engine asked again in another order; None where equality is demanded. The scores may then
            differ by as many questions as it answered otherwise, and by `SCORE_TOLERANCE` of them, rounded up.
        random_weights: the model knows nothing, so a score of 0 does not fail.
    """
    asked, changed = len(found.wanted), expected.changed(found)
    detail = f"{found.right} of {asked} right against {expected.right}; {changed} answers differ"
    if itself is None:
        equal = not changed
    else:
        allowed = max(expected.changed(itself), math.ceil(SCORE_TOLERANCE * asked))
        equal = abs(found.right - expected.right) <= allowed
        detail += f", scores may by {allowed}"
    errors = (*expected.errors, *found.errors)
    tells = random_weights or min(expected.right, found.right) > 0
    right = equal and tells and not errors
    return Check("arithmetic as right as one engine", right, "; ".join([detail, *errors[:3]]))


def judge_poison(expected: Sequence[Answer], found: Sequence[Answer], moved: int) -> Check:
    """With an overwritten cache every prompt is answered otherwise."""
    pairs = zip(expected, found, strict=True)
    changed = sum(left.tokens != right.tokens for left, right in pairs if not right.error)
    detail = f"{changed} of {len(found)} answers changed when the producer's cache was overwritten; {moved:,} B moved"
    return Check(POISON, changed == len(found) and moved > 0, detail)
