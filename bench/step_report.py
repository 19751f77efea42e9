"""The scenes' figures as tables, charts and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.figures import Chart, Limit, Results, Series, Table, Target
from bench.step_clock import clock_cost_us
from bench.step_scenes import BLOCKS, EVERYTHING, IDLE, LEASES, LOADS, NIXL, REQUESTS, Scene

LIMIT_US = 200.0
GROWTH = 1.5
NOISE_US = 20.0
"""Two scenes that are the same may differ by so much."""
_OF_EACH = "blocks of each request"
HALVES = ("producer's scheduler", "producer's worker", "consumer's scheduler", "consumer's worker")

_COMMAND = "python -m bench.step"
_WHAT = (
    "What kvferry adds to the engine's step thread, with vLLM's real scheduler and connectors at both ends and no "
    "model: the sum of all of its calls in one step, and of pickling what vLLM pickles, as processor time of the "
    "thread and by the wall. Every step hands one request over, of 32 blocks (512 tokens) where a row has no other "
    "number, beside leases that are held and loads that are in flight for ever. Both engines, scheduler and worker, "
    "share one interpreter here, so the wall has waits for its lock that several processes would not have."
)


@dataclass(frozen=True)
class Shown:
    """A scene and what was seen of it."""

    sweep: str
    scene: Scene
    seen: dict[str, Any]

    def line(self) -> str:
        p99 = ", ".join(f"{half} {self.us(half):.0f}" for half in HALVES)
        return f"{self.scene}: p99 {p99} us; lock {self.lock('p99'):.0f} us"

    def us(self, half: str, what: str = "p99", time: str = "cpu") -> float:
        return float(self.seen["halves"][half][time][what])

    def lock(self, what: str) -> float:
        return float(self.seen["lock_wait"][what])

    @property
    def dearest_p99(self) -> float:
        return max(self.us(half) for half in HALVES)

    @property
    def dearest_call_p99(self) -> float:
        """Of the kind of call whose p99 is the largest."""
        return max(float(call["p99"]) for half in HALVES for call in self.seen["halves"][half]["singly"].values())

    @property
    def same(self) -> dict[str, float]:
        same: dict[str, float] = self.seen["always_the_same"]
        return same


def results_of(found: Sequence[Shown], held: Sequence[dict[str, Any]], steps: int, *, quick: bool) -> Results:
    """Everything that one run says."""
    return Results(
        command=_COMMAND + (" --quick" if quick else ""),
        what=_WHAT,
        tables=(
            _steps_table(found),
            _lock_table(found),
            _calls_table(found),
            _single_table(found),
            _requests_table(found),
            _held_table(held),
        ),
        charts=_charts(found),
        targets=_targets(found),
        notes=(
            f"{steps} steps in each scene, 1 ms apart. The largest values hold Python's garbage collection and, "
            "once in ten seconds at most and when an engine has nothing to do, the check of its sums.",
            "A step without tokens waits a moment for loads that are under way, on purpose: that is in the wall time.",
            f"Timing a call adds {clock_cost_us():.2f} µs to it, and a step has about ten calls.",
            "Held leases have 10 blocks each; loads in flight 100, but where blocks are varied.",
            "`always the same`: processor time of work that never changes, done once in every step: its p99 beside its "
            "p50 says how much of a tail is the machine's.",
            "`lock`: how much longer than 1 ms a sleep of 1 ms took the step thread; the first 60 µs are the timer's.",
            "Loads in flight and held leases are on a fabric in memory, which keeps them so; one row has real NIXL.",
        ),
        raw={"scenes": [asdict(one) for one in found], "held_calls": list(held)},
        quick=quick,
    )


def _of(found: Sequence[Shown], sweep: str) -> list[Shown]:
    return [one for one in found if one.sweep == sweep]


def _steps_table(found: Sequence[Shown]) -> Table:
    rows = [
        (
            *_beside(one),
            half,
            one.us(half, "p50"),
            one.us(half),
            one.us(half, "max"),
            one.us(half, "p50", "wall"),
            one.us(half, "p99", "wall"),
        )
        for one in found
        for half in HALVES
    ]
    columns = ("half", "processor p50, µs", "p99", "max", "wall p50, µs", "p99")
    return Table("One handover a step", (*_BESIDE, *columns), rows)


def _lock_table(found: Sequence[Shown]) -> Table:
    rows = [
        (
            *_beside(one),
            one.lock("p50"),
            one.lock("p99"),
            float(one.seen["transfer_share"]),
            one.same["p50"],
            one.same["p99"],
        )
        for one in found
    ]
    columns = (*_BESIDE, "lock p50, µs", "p99", "transfer thread, of a core", "always the same, p50, µs", "p99")
    return Table("What the transfer thread costs the step thread", columns, rows)


_BESIDE = ("scene", "leases", "loads", "blocks in flight", _OF_EACH)


def _beside(one: Shown) -> tuple[str, int, int, int, int]:
    scene = one.scene
    return one.sweep, scene.leases, scene.loads, scene.blocks_in_flight, scene.blocks


def _calls_table(found: Sequence[Shown]) -> Table:
    ends = [one for name in (LEASES.name, EVERYTHING.name, IDLE.name) for one in _of(found, name)]
    rows = [
        (one.sweep, one.scene.leases, one.scene.loads, half, call, float(us))
        for one in ends
        for half in HALVES
        for call, us in one.seen["halves"][half]["calls"].items()
    ]
    return Table("The dearest calls", ("scene", "leases", "loads", "half", "call", "mean per step, µs"), rows)


def _single_table(found: Sequence[Shown]) -> Table:
    ends = [one for name in (LEASES.name, EVERYTHING.name) for one in _of(found, name)[-1:]]
    rows = [
        (one.sweep, one.scene.leases, one.scene.loads, half, name, *(float(call[x]) for x in ("count", "p50", "p99")))
        for one in ends
        for half in HALVES
        for name, call in sorted(one.seen["halves"][half]["singly"].items(), key=lambda item: -item[1]["p99"])[:4]
    ]
    columns = ("scene", "leases", "loads", "half", "call", "calls", "p50, µs", "p99")
    return Table("One call at a time", columns, rows)


def _requests_table(found: Sequence[Shown]) -> Table:
    """Blocks of a request are looked at once; this is what that costs, without what a request costs anyway."""
    scenes = _of(found, REQUESTS.name)
    rows = []
    for one in scenes[1:]:
        more = (one.scene.blocks - scenes[0].scene.blocks) / 1000
        grown = [(one.us(half, "p50") - scenes[0].us(half, "p50")) / more for half in HALVES]
        rows.append((one.scene.blocks, *(one.us(half, "p50") for half in HALVES), *grown))
    columns = (
        _OF_EACH,
        *(f"{x}, p50, µs" for x in HALVES),
        *(f"{x}, µs per 1,000 blocks" for x in HALVES),
    )
    return Table("What the blocks of one request cost, once", columns, rows)


def _held_table(held: Sequence[dict[str, Any]]) -> Table:
    rows = [(one["name"], float(one["us"]), float(one["free_share"])) for one in held]
    return Table("NIXL and the interpreter's lock", ("call", "median, µs", "share of it with the lock free"), rows)


def _charts(found: Sequence[Shown]) -> tuple[Chart, ...]:
    def growth(title: str, sweep: str, label: str, place: Callable[[Scene], int]) -> Chart:
        scenes = [one for one in _of(found, sweep) if place(one.scene)]
        x = [place(one.scene) for one in scenes]
        series = [
            Series(half, x, [one.us(half) for one in scenes], [one.us(half, "p50") for one in scenes])
            for half in HALVES
        ]
        limits = (Limit("target", LIMIT_US),)
        return Chart(title, label, "processor time of a step, p99, µs", series, x_log=True, limits=limits)

    loads = [one for one in _of(found, LOADS.name) if one.scene.loads]
    x = [one.scene.loads for one in loads]
    waits = [Series(what, x, [one.lock(what) for one in loads]) for what in ("p50", "p99", "max")]
    return (
        growth("The step thread and the leases held", LEASES.name, "leases held", lambda one: one.leases),
        growth("The step thread and the blocks in flight", BLOCKS.name, "blocks", lambda one: one.blocks_in_flight),
        growth("The step thread and the request's own blocks", REQUESTS.name, _OF_EACH, lambda one: one.blocks),
        growth("The step thread and the loads in flight", LOADS.name, "loads in flight", lambda one: one.loads),
        Chart("Waiting for the interpreter's lock", "loads in flight", "µs", waits, x_log=True, y_log=True),
    )


def _targets(found: Sequence[Shown]) -> tuple[Target, ...]:
    targets = []
    for name in (LEASES.name, EVERYTHING.name, NIXL.name):
        for one in _of(found, name)[-1:]:
            step, call = (f"step thread's processor time, p99, {what}{name}" for what in ("", "one call, "))
            targets.append(Target.at_most(step, one.dearest_p99, LIMIT_US, "µs", "all calls of a step added up"))
            note = "of the kind of call whose p99 is the largest"
            targets.append(Target.at_most(call, one.dearest_call_p99, LIMIT_US, "µs", note))
    for name in (LEASES.name, LOADS.name, BLOCKS.name):
        scenes = _of(found, name)
        for what in ("p50", "p99"):
            grown = max(scenes[-1].us(half, what) / (scenes[0].us(half, what) + NOISE_US / GROWTH) for half in HALVES)
            note = f"the worst of the four halves; {NOISE_US:g} µs are left to noise"
            targets.append(Target.at_most(f"growth of {what} with {name}", grown, GROWTH, "times", note))
    return tuple(targets)
