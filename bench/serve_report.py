"""Tables, charts and targets out of what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.figures import Cell, Chart, Series, Table, Target, spread
from bench.serve_figures import BATCHES, NAN, Batch, SetupFigures, by_length, median, percentile

By = Mapping[str, SetupFigures]
"""Figures by the setup's name."""

IDLE_LIMIT = 0.03
LEASE_LIMIT = 0.15
TTFT_LIMIT = 1.15
TAIL_LIMIT = 1.5
HANDOVER_LIMIT = 0.5
FLOOR = "one engine, prompt in its own cache"
"""Time of a first token without computing or fetching, with any connector or none."""


def tables(setups: By) -> tuple[Table, ...]:
    """Everything, for people."""
    return _handovers(setups), _first_tokens(setups), _crowds(setups), _cores(setups)


def charts(setups: By) -> tuple[Chart, ...]:
    """The handover and the first token by the prompt's length."""
    axes = ("prompt, tokens", "ms")
    return (
        Chart(
            "Handover, one request at a time: median and range",
            *axes,
            [_series(one, one.direct, "handover_s") for one in setups.values() if one.direct.good],
            x_log=True,
            y_log=True,
        ),
        Chart(
            "First token through the router, one request at a time: median and range",
            *axes,
            [_series(one, one.routed, "first_s") for one in setups.values() if one.routed.good],
            x_log=True,
            y_log=True,
        ),
    )


def targets(setups: By) -> tuple[Target, ...]:
    """The targets; without a figure of both sides a target has no number, and is not met."""
    missing = SetupFigures(next(iter(setups.values())).setup)
    ours, peer, single = (setups.get(name, missing) for name in ("kvferry", "calm", "single"))
    found = []
    for share, word in ((0.5, "p50"), (0.99, "p99")):
        for batch, other, floor, crowd in (
            (ours.direct, peer.direct, single.cached, "1 at a time"),
            (ours.direct_crowd, peer.direct_crowd, single.cached_crowd, "8 at once"),
        ):
            found.append(
                Target.at_most(
                    f"handover minus one decode step, {word}, {crowd}",
                    1e3 * above_step(batch, share),
                    1e3 * HANDOVER_LIMIT * above_step(other, share),
                    "ms",
                    "half of the event-driven peer's" + _of_floor(batch, other, floor, share),
                )
            )
    found += [
        Target.at_most(
            "first token less one decode step, by the single engine's, worst length",
            slowest_first_token(ours.routed, single.routed),
            TTFT_LIMIT,
            "times",
            "medians by length; 1 at a time; decode step of the same run",
        ),
        Target.at_most(
            "first token, p99/p50 with each prompt by its length's median",
            level_tail(ours.routed),
            TAIL_LIMIT * level_tail(single.routed),
            "times",
            f"the single engine's times {TAIL_LIMIT:g}; the spread of lengths hides nothing",
        ),
    ]
    without = next(iter(single.idle.values()), {}).get("worker", NAN)
    for name, cores in ours.idle.items():
        what = f"idle worker of {name}, more than without connector"
        found.append(Target.at_most(what, cores["worker"] - without, IDLE_LIMIT, "cores"))
    if ours.leased is not None:
        found.append(Target.at_most("producer with one lease held", ours.leased["all"], LEASE_LIMIT, "cores"))
    return tuple(found)


def above_step(batch: Batch, share: float) -> float:
    """A percentile of the handover without the decode step that every first token takes, in seconds."""
    return batch.handover_s(share) - batch.decode_step_s


def slowest_first_token(pair: Batch, single: Batch) -> float:
    """The first token less a decode step, divided by the single engine's; medians, the worst of all lengths."""
    ratios = [
        (pair.first_s(0.5, length) - pair.decode_step_s) / single.first_s(0.5, length)
        for length in by_length(pair)
        if length in by_length(single)
    ]
    return max(ratios, default=NAN)


def level_tail(batch: Batch) -> float:
    """How much slower the slowest of a hundred is than the usual one; each time by its prompt length's median."""
    medians = {length: batch.first_s(0.5, length) for length in by_length(batch)}
    level = [one.first_s / medians[one.prompt_tokens] for one in batch.good]
    return percentile(level, 0.99) / percentile(level, 0.5)


def notes(setups: By) -> tuple[str, ...]:
    """Notes beside the figures: circumstances, and what failed."""
    found = [
        "Every engine has one core, the single engine as the producer and the decoder; client, router and the servers' "
        "other processes share both.",
        "vLLM's workers poll their queue for one second after each step, in every setup; idle is measured after it.",
    ]
    for one in setups.values():
        if one.error:
            found.append(f"{one.setup.title} ended early: {one.error}")
        for name, what in BATCHES.items():
            batch: Batch = getattr(one, name)
            errors = sorted({timing.error for timing in batch.timings if timing.error})
            unasked = batch.asked - len(batch.timings) if math.isfinite(batch.seconds) else 0
            if errors or unasked:
                left = f"; {unasked} were not begun, the time was up" if unasked else ""
                why = f": {'; '.join(errors[:3])}" if errors else ""
                found.append(f"{one.setup.title}, {what}: {batch.failed} of {batch.asked} failed{why}{left}")
    return tuple(found)


def _of_floor(ours: Batch, peer: Batch, floor: Batch, share: float) -> str:
    """How much of it is the connector's; empty where the floor was not measured."""
    least = above_step(floor, share)
    if not math.isfinite(least):
        return ""
    mine, others = (1e3 * (above_step(batch, share) - least) for batch in (ours, peer))
    return f"; a prompt in the engine's own cache takes {1e3 * least:.1f} ms, beyond it {mine:.1f} and {others:.1f} ms"


def _series(one: SetupFigures, batch: Batch, what: str) -> Series:
    times = [
        (length, [1e3 * getattr(timing, what) for timing in batch.good if timing.prompt_tokens == length])
        for length in by_length(batch)
    ]
    return Series.of_samples(one.setup.title, times)


def _ms(seconds: float) -> Cell:
    return round(1e3 * seconds, 1) if math.isfinite(seconds) else None


def _handovers(setups: By) -> Table:
    rows: list[Sequence[Cell]] = [
        [
            name,
            batch.at_once,
            len(batch.good),
            batch.failed,
            *(_ms(batch.handover_s(share)) for share in (0.5, 0.99)),
            _ms(batch.decode_step_s),
            *(_ms(above_step(batch, share)) for share in (0.5, 0.99)),
        ]
        for one in setups.values()
        for name, batch in (
            (one.setup.title, one.direct),
            (one.setup.title, one.direct_crowd),
            (FLOOR, one.cached),
            (FLOOR, one.cached_crowd),
        )
        if batch.asked
    ]
    columns = ("", "at once", "answered", "failed", "p50", "p99", "decode step", "p50 less a step", "p99 less a step")
    title = "Handover, from the producer's answer to the first token: ms"
    return Table(title, columns, rows)


def _first_tokens(setups: By) -> Table:
    lengths = sorted({length for one in setups.values() for length in by_length(one.routed)})
    rows: list[Sequence[Cell]] = []
    for one in setups.values():
        times = [[1e3 * x.first_s for x in one.routed.good if x.prompt_tokens == length] for length in lengths]
        ranges = [f"{median(some):.0f} ({spread(some)})" if some else None for some in times]
        rows.append([one.setup.title, len(one.routed.good), one.routed.failed, *ranges, _ms(one.routed.decode_step_s)])
    columns = ["", "answered", "failed", *(f"{length:,} tokens" for length in lengths), "decode step"]
    return Table("First token through the router, 1 at a time: ms, median (range)", columns, rows)


def _crowds(setups: By) -> Table:
    rows: list[Sequence[Cell]] = []
    for one in setups.values():
        batch = one.routed_crowd
        prompts = sum(timing.prompt_tokens for timing in batch.good)
        rates = [len(batch.good) / batch.seconds, prompts / batch.seconds]
        rows.append(
            [one.setup.title, len(batch.good), batch.failed, _ms(batch.first_s(0.5)), _ms(batch.first_s(0.99)), *rates]
        )
    columns = ("", "answered", "failed", "first token p50, ms", "p99, ms", "requests/s", "prompt tokens/s")
    return Table("8 at once through the router", columns, rows)


def _cores(setups: By) -> Table:
    kinds = ("server", "engine core", "worker", "all")
    rows: list[Sequence[Cell]] = []
    for one in setups.values():
        watched = [(f"{name}, idle", cores) for name, cores in one.idle.items()]
        if one.leased is not None:
            watched.append(("producer, one lease held", one.leased))
        rows += [[one.setup.title, what, *(cores.get(kind, 0.0) for kind in kinds)] for what, cores in watched]
    return Table("Processor: cores", ("", "", *kinds), rows)
