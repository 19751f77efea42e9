"""The scenes' figures as tables, charts and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.figures import Cell, Chart, Results, Series, Table, Target
from bench.step_scenes import (
    BLOCKS,
    EVERYTHING,
    IDLE,
    LEASES,
    LOADS,
    NIXL,
    REQUESTS,
    Scene,
)

LIMIT_US = 200.0
GROWTH = 1.5
NOISE_US = 20.0
"""Two scenes that are the same may differ by so much."""
HALVES = (
    "producer's scheduler",
    "producer's worker",
    "consumer's scheduler",
    "consumer's worker",
)

_COMMAND = "python -m bench.step"
_WHAT = (
    "What kvferry adds to the engine's step thread, with vLLM's real scheduler and connectors at both ends and no "
    "model: the sum of all of its calls in one step, and of pickling what vLLM pickles, as processor time of the "
    "thread and by the wall. Every step hands one request over, of 32 blocks (512 tokens) where a row has no other "
    "number, beside leases that are held and loads that are in flight for ever. Both engines, scheduler and worker, "
    "share one interpreter here, so the wall has waits for its lock that several processes would not have."
)
_SCENE = ("scene", "leases", "loads", "blocks in flight", "blocks of each request")


@dataclass(frozen=True)
class Shown:
    """A scene and what was seen of it, as `bench.step_flow.Seen` in plain values."""

    sweep: str
    scene: Scene
    seen: Mapping[str, Any]

    def us(self, half: str, what: str = "p99", time: str = "cpu") -> float:
        return float(self.seen["halves"][half][time][what])

    @property
    def dearest_p99(self) -> float:
        return max(self.us(half) for half in HALVES)

    @property
    def dearest_call_p99(self) -> float:
        """Of the kind of call whose p99 is the largest."""
        return max(
            float(call["p99"])
            for half in HALVES
            for call in self.seen["halves"][half]["singly"].values()
        )

    @property
    def cells(self) -> tuple[str, int, int, int, int]:
        """Under the columns `_SCENE`."""
        scene = self.scene
        return (
            self.sweep,
            scene.leases,
            scene.loads,
            scene.blocks_in_flight,
            scene.blocks,
        )


def results_of(found: Sequence[Shown], steps: int, *, quick: bool) -> Results:
    """Everything that one run says."""
    return Results(
        command=_COMMAND + (" --quick" if quick else ""),
        what=_WHAT,
        tables=(_steps_table(found), _calls_table(found)),
        charts=_charts(found),
        targets=_targets(found),
        notes=(
            f"{steps} steps in each scene, at least 1 ms apart. The largest values hold Python's garbage collection "
            "and, once in ten seconds at most and when an engine has nothing to do, the check of its sums.",
            "A step without tokens waits a moment for loads that are under way, on purpose: that is in the wall time.",
            "Held leases have 10 blocks each; loads in flight 100, but where blocks are varied. They are on a fabric "
            "in memory, which keeps them so; one row has real NIXL.",
        ),
        quick=quick,
    )


def _of(found: Sequence[Shown], sweep: str) -> list[Shown]:
    return [one for one in found if one.sweep == sweep]


def _steps_table(found: Sequence[Shown]) -> Table:
    """With constant work that was timed in the same steps: how much of a tail is the machine's."""
    columns = ("half", "processor p50, µs", "p99", "max", "wall p50, µs", "p99")
    rows: list[tuple[Cell, ...]] = []
    for one in found:
        rows += [
            (
                *one.cells,
                half,
                *(one.us(half, what) for what in ("p50", "p99", "max")),
                *(one.us(half, what, "wall") for what in ("p50", "p99")),
            )
            for half in HALVES
        ]
        same = one.seen["always_the_same"]
        rows.append(
            (
                *one.cells,
                "work that never changes",
                same["p50"],
                same["p99"],
                same["max"],
                None,
                None,
            )
        )
    return Table("One handover a step", (*_SCENE, *columns), rows)


def _calls_table(found: Sequence[Shown]) -> Table:
    """The four dearest kinds of call of each half."""
    ends = [
        one for name in (EVERYTHING.name, IDLE.name) for one in _of(found, name)[-1:]
    ]
    rows = [
        (
            *one.cells[:3],
            half,
            name,
            *(float(call[what]) for what in ("count", "p50", "p99")),
        )
        for one in ends
        for half in HALVES
        for name, call in sorted(
            one.seen["halves"][half]["singly"].items(), key=lambda item: -item[1]["p99"]
        )[:4]
    ]
    return Table(
        "The dearest calls",
        (*_SCENE[:3], "half", "call", "calls", "p50, µs", "p99"),
        rows,
    )


def _charts(found: Sequence[Shown]) -> tuple[Chart, ...]:
    def growth(sweep: str, label: str, place: Callable[[Scene], int]) -> Chart:
        scenes = [one for one in _of(found, sweep) if place(one.scene)]
        x = [place(one.scene) for one in scenes]
        series = [
            Series(
                half,
                x,
                [one.us(half) for one in scenes],
                [one.us(half, "p50") for one in scenes],
            )
            for half in HALVES
        ]
        title = f"The step thread and the {label}: p99, and down to p50"
        return Chart(
            title,
            label,
            "processor time of a step, µs",
            series,
            x_log=True,
            limit=LIMIT_US,
        )

    return (
        growth(LEASES.name, "leases held", lambda one: one.leases),
        growth(LOADS.name, "loads in flight", lambda one: one.loads),
        growth(REQUESTS.name, "blocks of each request", lambda one: one.blocks),
    )


def _targets(found: Sequence[Shown]) -> tuple[Target, ...]:
    targets = []
    for name in (LEASES.name, EVERYTHING.name, NIXL.name):
        for one in _of(found, name)[-1:]:
            step, call = (
                f"step thread's processor time, p99, {what}{name}"
                for what in ("", "one call, ")
            )
            targets.append(
                Target.at_most(
                    step,
                    one.dearest_p99,
                    LIMIT_US,
                    "µs",
                    "all calls of a step added up",
                )
            )
            note = "of the kind of call whose p99 is the largest"
            targets.append(
                Target.at_most(call, one.dearest_call_p99, LIMIT_US, "µs", note)
            )
    for name in (LEASES.name, LOADS.name, BLOCKS.name):
        scenes = _of(found, name)
        for what in ("p50", "p99"):
            grown = max(
                scenes[-1].us(half, what)
                / (scenes[0].us(half, what) + NOISE_US / GROWTH)
                for half in HALVES
            )
            note = f"the worst of the four halves; {NOISE_US:g} µs are left to noise"
            targets.append(
                Target.at_most(
                    f"growth of {what} with {name}", grown, GROWTH, "times", note
                )
            )
    return tuple(targets)
