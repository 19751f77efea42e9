"""The benchmark of questions on the step thread: what it judges its figures by."""

from __future__ import annotations

import pytest
from bench.prefix_step import JUDGED, LIMIT_US, SCHEDULER_ALONE, TAKE, Times, results_of

WITHIN_NS = round(LIMIT_US * 1e3) - 1000
BEYOND_NS = WITHIN_NS + 2000


def met(**changed: list[int]) -> list[bool]:
    """Whether each target is met: two for each part, of CPU time and by the wall clock."""
    times = {name: Times([WITHIN_NS] * 100, [WITHIN_NS] * 100) for name in JUDGED}
    times[SCHEDULER_ALONE] = Times([BEYOND_NS], [BEYOND_NS])
    for name, samples in changed.items():
        setattr(times[TAKE], name, samples)
    return [target.met for target in results_of(times, 5, quick=True).targets]


@pytest.mark.parametrize(("name", "place"), [("cpu_ns", 0), ("wall_ns", 1)])
def test_each_part_is_judged_by_its_99th_percentile(name: str, place: int) -> None:
    assert met() == [True] * 2 * len(JUDGED)
    assert met(**{name: [WITHIN_NS] * 99 + [BEYOND_NS]}) == met(), "one of 100"
    some_beyond = met(**{name: [WITHIN_NS] * 97 + [BEYOND_NS] * 3})
    assert [at for at, one in enumerate(some_beyond) if not one] == [place]


def test_what_a_question_adds_is_what_a_step_takes_beyond_the_median_without_one() -> (
    None
):
    usual = Times([10, 20, 90], [30, 40, 90])
    added = Times([25, 15], [40, 100]).beyond(usual)
    assert (added.cpu_ns, added.wall_ns) == ([5, -5], [0, 60])


def test_only_calls_that_have_something_to_do_are_timed() -> None:
    class Part:
        def step(self, work: int) -> int:
            return work

    part = Part()
    times = Times()
    times.time(part, "step", bool)
    assert [part.step(work) for work in (0, 7, 0)] == [0, 7, 0]
    assert len(times.cpu_ns) == len(times.wall_ns) == 1
    times.forget()
    assert not times.cpu_ns
