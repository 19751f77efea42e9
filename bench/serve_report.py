"""Tables, charts and targets out of what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.figures import Cell, Chart, Series, Table, Target, spread
from bench.serve_figures import (
    CROWD,
    NAN,
    SATURATING,
    Batch,
    SetupFigures,
    by_length,
    median,
)
from bench.serve_setups import CALM, KVFERRY, OFF, SINGLE

By = Mapping[str, SetupFigures]
"""Figures by the setup's name."""

HANDOVER_LIMIT_MS = 8.0
FIRST_TOKEN_LIMIT_MS = 15.0
CROWD_LIMIT_MS = 110.0
RATE_LIMIT = 0.97
IDLE_LIMIT = 0.03
LEASE_LIMIT = 0.15


def tables(setups: By) -> tuple[Table, ...]:
    """Everything, for people."""
    return _alone(setups), _at_once(setups), _cores(setups)


def charts(setups: By) -> tuple[Chart, ...]:
    """The handover and the first token by the prompt's length."""
    return tuple(
        Chart(
            f"{title}, one request at a time: median and range",
            "prompt, tokens",
            "ms",
            series,
            x_log=True,
            y_log=True,
        )
        for title, series in (
            (
                "Handover",
                [
                    _series(one, "handover_s")
                    for name, one in setups.items()
                    if name != SINGLE.name
                ],
            ),
            ("First token", [_series(one, "first_s") for one in setups.values()]),
        )
    )


def targets(setups: By) -> tuple[Target, ...]:
    """The targets; without a figure of both sides a target has no number, and is not met."""
    missing = SetupFigures(next(iter(setups.values())).setup)
    ours, off, peer, single = (
        setups.get(setup.name, missing) for setup in (KVFERRY, OFF, CALM, SINGLE)
    )
    found = [
        Target.at_most(
            f"handover minus one decode step, p50, {length:,} tokens",
            1e3 * ours.batches[1].of(length).above_step_s(),
            HANDOVER_LIMIT_MS,
            "ms",
            _beside(
                off.batches[1].of(length).above_step_s(),
                peer.batches[1].of(length).above_step_s(),
            ),
        )
        for length in by_length(ours.batches[1])
    ]
    added_s = [
        above_single_s(one.batches[1], single.batches[1], 128)
        for one in (ours, off, peer)
    ]
    crowded_s = [one.batches[CROWD].above_step_s() for one in (ours, off, peer)]
    found += [
        Target.at_most(
            "first token minus one decode step minus the single engine's first token, 128 tokens",
            1e3 * added_s[0],
            FIRST_TOKEN_LIMIT_MS,
            "ms",
            _beside(*added_s[1:]),
        ),
        Target.at_most(
            "handover minus one decode step, p50, 8 at once",
            1e3 * crowded_s[0],
            min(CROWD_LIMIT_MS, 1e3 * crowded_s[2] / 2),
            "ms",
            f"{CROWD_LIMIT_MS:g}, and half of NixlConnector's; {_beside(*crowded_s[1:])}",
        ),
        Target.at_least(
            "requests/s, 16 at once, by those with one leg after the other",
            median(
                mine / theirs
                for mine, theirs in zip(
                    ours.batches[SATURATING].rates,
                    off.batches[SATURATING].rates,
                    strict=False,
                )
            ),
            RATE_LIMIT,
            "times",
            f"{len(ours.batches[SATURATING].rates)} pairs of turns, median",
        ),
        Target.at_most(
            "idle engine, more than the single one",
            max(ours.idle, default=NAN) - min(single.idle, default=NAN),
            IDLE_LIMIT,
            "cores",
        ),
        Target.at_most(
            "producer with one lease held", ours.leased, LEASE_LIMIT, "cores"
        ),
    ]
    return tuple(found)


def above_single_s(pair: Batch, single: Batch, length: int) -> float:
    """How much later the first token of prompts of a length comes than the single engine's; without a decode step."""
    return (
        pair.of(length).first_s()
        - pair.of(length).decode_step_s
        - single.of(length).first_s()
    )


def notes(setups: By, device: str = "cpu") -> tuple[str, ...]:
    """Notes beside the figures: circumstances, and what failed."""
    found = [
        *[
            "Every engine has one core, the single engine as the producer and the decoder; client, router and the "
            "servers' other processes share both."
        ][: device == "cpu"],
        "An uncounted prompt begins each turn. vLLM's workers poll their queue for a second after each step, in every "
        "setup; idle is measured after it.",
    ]
    for one in setups.values():
        if one.error:
            found.append(f"{one.setup.title} ended early: {one.error}")
        for at_once, batch in one.batches.items():
            errors = sorted({timing.error for timing in batch.timings if timing.error})
            if errors:
                why = "; ".join(errors[:3])
                found.append(
                    f"{one.setup.title}, {at_once} at once: {batch.failed} of {len(batch.timings)} failed: {why}"
                )
    return tuple(found)


def _beside(off_s: float, peer_s: float) -> str:
    return f"after the prefill {1e3 * off_s:.1f}, NixlConnector {1e3 * peer_s:.1f}"


def _series(one: SetupFigures, what: str) -> Series:
    times = [
        (
            length,
            [1e3 * getattr(timing, what) for timing in one.batches[1].of(length).good],
        )
        for length in by_length(one.batches[1])
    ]
    return Series.of_samples(one.setup.title, times)


def _ms(seconds: float) -> Cell:
    return round(1e3 * seconds, 1) if math.isfinite(seconds) else None


def _alone(setups: By) -> Table:
    lengths = sorted(
        {length for one in setups.values() for length in by_length(one.batches[1])}
    )
    rows: list[Sequence[Cell]] = []
    for one in setups.values():
        batches = [one.batches[1].of(length) for length in lengths]
        figures_s = [batch.first_s() for batch in batches] + [
            batch.above_step_s() for batch in batches
        ]
        rows.append(
            [
                one.setup.title,
                len(one.batches[1].good),
                *map(_ms, [one.batches[1].decode_step_s, *figures_s]),
            ]
        )
    columns = [
        f"{what}, {length:,}"
        for what in ("first token", "handover")
        for length in lengths
    ]
    title = "1 at a time, by tokens of the prompt; handover, less a step, from the producer's HTTP answer: ms, medians"
    return Table(title, ("", "answered", "decode step", *columns), rows)


def _at_once(setups: By) -> Table:
    rows: list[Sequence[Cell]] = [
        [
            one.setup.title,
            at_once,
            len(batch.good),
            *map(
                _ms,
                (batch.decode_step_s, batch.above_step_s(), batch.above_step_s(0.99)),
            ),
            *(_ms(batch.first_s(share)) for share in (0.5, 0.99)),
            median(batch.rates),
            spread(batch.rates),
        ]
        for one in setups.values()
        for at_once, batch in one.batches.items()
        if at_once > 1 and batch.timings
    ]
    columns = (
        "",
        "at once",
        "answered",
        "decode step",
        "handover less a step, p50",
        "p99",
        "first token, p50",
        "p99",
    )
    return Table(
        "Several at once: ms", (*columns, "requests/s", "range of turns"), rows
    )


def _cores(setups: By) -> Table:
    rows: list[Sequence[Cell]] = [
        [one.setup.title, one.idle[0], one.idle[-1], one.leased]
        for one in setups.values()
        if one.idle
    ]
    columns = ("", "producer, idle", "consumer, idle", "producer, one lease held")
    return Table("Processor: cores of all processes of an engine", columns, rows)
