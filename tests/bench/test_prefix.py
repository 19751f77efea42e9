"""The benchmark of prefixes: what it judges its figures by."""

from __future__ import annotations

from bench.prefix import COMPUTED, LOCAL, PULLED, Asked, results_of


def asked(first_ms: float) -> Asked:
    return Asked([first_ms / 1e3] * 3, [0.04] * 3)


def judged(pulled_ms: float, wrong: int = 0) -> list[bool]:
    answers = {COMPUTED: asked(800), PULLED: asked(pulled_ms), LOCAL: asked(60)}
    return [target.met for target in results_of(answers, wrong, quick=True).targets]


def test_a_pull_is_judged_by_a_local_hit_and_one_step_and_by_computing() -> None:
    assert judged(124) == [True, True, True]
    # 25 ms and a step of 40 ms after the local hit.
    assert judged(126) == [False, True, True]
    # A fifth of computing.
    assert judged(161) == [False, False, True]
    assert judged(124, wrong=1) == [True, True, False]
