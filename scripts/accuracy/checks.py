"""The checks, computed from recorded answers. Pure: no engine is called here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scripts.accuracy.client import Answer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.prompts import Case

LIMITS = {"float32": 1e-3, "float16": 1 / 8, "bfloat16": 1.0}
"""Log-probabilities of the same token may differ by so much. A logit between 16 and 32 is rounded to a multiple of 1/64
in float16 and of 1/8 in bfloat16, which have 11 and 8 significant bits: eight such steps."""
_MEAN_SHARE = 1 / 4
"""The mean difference may be so much of the largest one that is allowed: a fault shifts all of them, rounding a few."""
_MOST_DIFFERENT = 1 / 2
"""Of the prompts so many may be answered otherwise where rounding decides."""
LIKELIEST = 5
"""Tokens whose log-probabilities are asked for at each place: the other engine's choice must be among them."""
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
        largest_gap, mean_gap: of log-probabilities of a token after equal tokens, that of the first difference
            included; infinite where a side lacks one.
    """

    prompts: int
    tokens: int
    differences: Mapping[str, str]
    largest_gap: float
    mean_gap: float = 0.0

    def agrees(self, dtype: str) -> bool:
        """Whether both sides computed the same, up to the rounding of `dtype`."""
        is_close = self.mean_gap <= _MEAN_SHARE * LIMITS[dtype]
        return (
            self.is_near(dtype)
            and is_close
            and len(self.differences) <= _MOST_DIFFERENT * self.prompts
        )

    def is_near(self, dtype: str) -> bool:
        """Whether rounding explains every single difference.

        Tokens may differ where both sides give both tokens nearly the same log-probabilities, so that rounding decides;
        in float32 never.
        """
        return self.largest_gap <= LIMITS[dtype] and not (
            dtype == "float32" and self.differences
        )


def compare(
    cases: Sequence[Case], expected: Mapping[str, Answer], found: Sequence[Answer]
) -> Comparison:
    """Compare with what is expected of each case, token by token. An error on either side is a difference; so is a
    missing token or log-probability."""
    tokens = 0
    every: list[float] = []
    differences: dict[str, str] = {}
    for case, right in zip(cases, found, strict=True):
        left = expected[case.name]
        same = equal_tokens(left.tokens, right.tokens)
        gaps = [
            abs(a - b)
            for a, b in zip(left.logprobs[:same], right.logprobs[:same], strict=False)
        ]
        if left.error or right.error:
            differences[case.name] = left.error or right.error
            gaps.append(math.inf)
        elif same < max(len(left.tokens), len(right.tokens), case.max_tokens):
            ours, theirs = right.tokens[same : same + 4], left.tokens[same : same + 4]
            differences[case.name] = f"from token {same} on {ours} instead of {theirs}"
            gaps.append(_gap_of_choices(left, right, same))
        elif len(gaps) < same:
            differences[case.name] = f"{len(gaps)} log-probabilities for {same} tokens"
            gaps.append(math.inf)
        tokens += same
        every += [gap if math.isfinite(gap) else math.inf for gap in gaps]
    mean = sum(every) / len(every) if every else 0.0
    return Comparison(len(cases), tokens, differences, max(every, default=0.0), mean)


def _gap_of_choices(left: Answer, right: Answer, at: int) -> float:
    """Of both tokens that the sides chose at a place; infinite where a side chose none, or has none of the other's."""
    if any(at >= min(len(side.tokens), len(side.likeliest)) for side in (left, right)):
        return math.inf
    chosen, ours, theirs = (
        {left.tokens[at], right.tokens[at]},
        left.likeliest[at],
        right.likeliest[at],
    )
    if not chosen <= ours.keys() & theirs.keys():
        return math.inf
    return max(abs(ours[token] - theirs[token]) for token in chosen)


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def judge_tokens(found: Comparison, dtype: str) -> list[Check]:
    """The tokens and log-probabilities of the single engine, as near as `dtype` can have them."""
    shown = "; ".join(
        f"{name}: {detail}" for name, detail in list(found.differences.items())[:3]
    )
    detail = f"{len(found.differences)} of {found.prompts} prompts differ, {found.tokens} tokens are equal"
    limit = LIMITS[dtype]
    gap = f"largest difference {found.largest_gap:.2g}, allowed {limit:.2g}"
    gap += f"; mean {found.mean_gap:.2g}, allowed {_MEAN_SHARE * limit:.2g}"
    if dtype != "float32":
        gap += ", of a first other token too"
    return [
        Check(
            "same tokens as one engine",
            found.agrees(dtype),
            f"{detail}. {shown}" if shown else detail,
        ),
        Check(
            "same log-probabilities",
            found.largest_gap <= limit and found.mean_gap <= _MEAN_SHARE * limit,
            gap,
        ),
    ]


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
        blocks = (
            sum(math.ceil(tokens / self.block) for tokens in prompts)
            - hit_tokens // self.block
        )
        return blocks * self.block * self.token_bytes

    def __str__(self) -> str:
        text = f"Σ (⌈prompt/{self.block}⌉ − hit/{self.block}) × {self.block} × {self.token_bytes} B ({self.shape})"
        return f"{text}; staged, at least" if self.at_least else text


def judge_bytes(
    seen: Mapping[str, Seen], formula: Formula | None, ferry: bool
) -> Check:
    """Every prompt moved what the formula says, by the plan and by NIXL's own count."""
    nixl, planned = (
        sum(one.nixl_bytes for one in seen.values()),
        sum(one.planned_bytes for one in seen.values()),
    )
    if formula is None:
        nothing = [
            name
            for name, one in seen.items()
            if not (one.nixl_bytes or one.local_tokens)
        ]
        detail = f"NIXL {nixl:,}, plan {planned:,}; no formula for this model"
        detail += f"; nothing for {', '.join(nothing[:3])}" * bool(nothing)
        return Check(BYTES, nixl > 0 and not nothing, detail)
    needed = {
        name: formula.bytes_of(one.prompts, one.local_tokens)
        for name, one in seen.items()
    }
    wrong: list[str] = []
    for name, one in seen.items():
        right = (
            one.nixl_bytes >= needed[name]
            if formula.at_least
            else one.nixl_bytes == needed[name]
        )
        if not right or (ferry and one.planned_bytes != one.nixl_bytes):
            wrong.append(
                f"{name}: {one.nixl_bytes:,} instead of {needed[name]:,}, plan {one.planned_bytes:,}"
            )
    detail = f"formula {sum(needed.values()):,}, plan {planned:,}, NIXL {nixl:,}"
    return Check(BYTES, not wrong, "; ".join([detail, *wrong[:3]]))


def judge_hits(cases: Iterable[Case], seen: Mapping[str, Seen], block: int) -> Check:
    """Full and partial prefix hits on the decoder happened where they were meant to."""
    foreseen = [
        (case, seen[case.name])
        for case in cases
        if case.hit_blocks is not None and case.name in seen
    ]
    wrong = [
        f"{case.name}: {one.local_tokens} tokens instead of {case.hit_blocks} blocks"
        for case, one in foreseen
        if one.local_tokens != (case.hit_blocks or 0) * block
    ]
    hits = sum(bool(case.hit_blocks) for case, _ in foreseen)
    detail = f"{hits} prompts with a hit, {len(foreseen) - hits} without, as foreseen"
    return Check(
        "prefix hits on the decoder",
        not wrong,
        "; ".join(wrong[:3]) if wrong else detail,
    )


def judge_computed(prompts: int, requests: int, tokens: int) -> Check:
    """The decoder computed one token of each transferred prompt: the last one, for its logits."""
    detail = f"{tokens} prompt tokens in {requests} requests; {prompts} prompts were transferred"
    return Check(
        "decoder computed 1 token a prompt", prompts == requests == tokens, detail
    )


def judge_recomputes(counters: Scrape) -> Check:
    """No prompt that came with params was computed on the decoder after all, and no transfer failed."""
    recomputed = counters.by_label("vllm:kvferry_local_recomputes_total", "reason")
    failed = counters.total("vllm:nixl_num_failed_transfers_total")
    reported = (
        ", ".join(
            f"{reason} {count:.0f}" for reason, count in sorted(recomputed.items())
        )
        or "none"
    )
    detail = f"prompts computed on the decoder instead: {reported}; failed transfers: {failed:.0f}"
    return Check("nothing was computed twice", not recomputed and not failed, detail)


def judge_streams(counters: Scrape) -> Check:
    """Some bytes were read before the prefill had ended."""
    early, planned = (
        counters.total(f"vllm:kvferry_{kind}_bytes_total")
        for kind in ("early", "planned")
    )
    return Check(
        "read while it is prefilled",
        early > 0,
        f"{early / 1e6:.1f} of {planned / 1e6:.1f} MB",
    )


def judge_in_turn(
    compared: Comparison, moved: int, recomputed: float, dtype: str
) -> Check:
    """One leg after the other: the cache was moved, nothing was computed again, and the answers are the single
    engine's."""
    others = ", ".join(compared.differences) or "none"
    detail = f"{compared.tokens} tokens of {compared.prompts} prompts are equal, {moved:,} B moved, {recomputed:.0f} "
    detail += f"computed again; other prompts: {others}"
    return Check(
        "one leg after the other",
        moved > 0 and not recomputed and compared.agrees(dtype),
        detail,
    )


def judge_leases(still_open: int, ways: Mapping[str, float]) -> Check:
    """Every lease of the producers is over. `ways`: how many ended in which way."""
    reported = ", ".join(f"{how} {count:.0f}" for how, count in sorted(ways.items()))
    return Check("leases are over", still_open == 0, f"{still_open} open; {reported}")


def judge_arithmetic(
    compared: Comparison, right: tuple[int, int], dtype: str, *, random_weights: bool
) -> Check:
    """The single engine's answers to questions. A score of 0 fails: it cannot tell two engines apart.

    Args:
        right: right answers of the single engine, and through the router.
        random_weights: the model knows nothing, so a score of 0 does not fail.
    """
    gap = f"log-probabilities by at most {compared.largest_gap:.2g}"
    answers = f"{len(compared.differences)} answers differ"
    detail = (
        f"{right[1]} of {compared.prompts} right against {right[0]}; {answers}, {gap}"
    )
    passed = compared.agrees(dtype) and (random_weights or min(right) > 0)
    return Check("arithmetic as right as one engine", passed, detail)


def judge_poison(
    cases: Sequence[Case],
    expected: Mapping[str, Answer],
    found: Sequence[Answer],
    moved: int,
    dtype: str,
) -> Check:
    """With an overwritten cache no prompt is answered as by the single engine: the comparison would notice."""
    pairs = [
        (case, answer)
        for case, answer in zip(cases, found, strict=True)
        if not answer.error
    ]
    changed = sum(
        not compare([case], expected, [answer]).is_near(dtype) for case, answer in pairs
    )
    detail = f"{changed} of {len(found)} answers changed when the producer's cache was overwritten; {moved:,} B moved"
    return Check(POISON, changed == len(found) and moved > 0, detail)
