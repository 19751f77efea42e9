"""Published results of `bench.relayout`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import Chart, Results, Series, Table, Target

MIN_COPY_SHARE, MIN_PEER_RATIO = 0.9, 5.0
"""Targets on a GPU: the share of the copy's bandwidth, and the factor over layer by layer."""

_WHAT = """\
GB/s of the relayout, which puts what was read in the producer's shape in its place in the consumer's cache. The
engines of a pair have other blocks, layouts or dtypes. Beside it, in the same run, a plain copy of the same bytes, and
gathering and scattering layer by layer as vLLM's own connector does. Bytes read and written count. Device: {device}."""
_COLUMNS = (
    "setup",
    "tokens",
    "pool, MiB",
    "tile",
    "waves",
    "moved, MB",
    "copy, GB/s",
    "kernel, GB/s",
    "driven, GB/s",
    "layer by layer, GB/s",
    "of the copy",
    "over layer by layer",
)


def results_of(
    figures: Sequence[Mapping[str, Any]], device: str, on_gpu: bool, command: str, quick: bool = False
) -> Results:
    """From the figures of all setups, as fields of `bench.relayout.Figure`; limits are promised only for a GPU."""
    best = [one["kernel_gb_s"] or one["driven_gb_s"] for one in figures]
    shares = [rate / one["copy_gb_s"] for rate, one in zip(best, figures, strict=True)]
    ratios = [rate / one["layer_by_layer_gb_s"] for rate, one in zip(best, figures, strict=True)]
    named = ("setup", "tokens", "pool_mib", "tile", "waves", "moved_mb", "copy_gb_s", "kernel_gb_s", "driven_gb_s")
    rows = [
        [*(one[name] for name in named), one["layer_by_layer_gb_s"], share, ratio]
        for one, share, ratio in zip(figures, shares, ratios, strict=True)
    ]
    most = max(one["tokens"] for one in figures)
    largest = (most, max(one["pool_mib"] for one in figures), figures[0]["tile"])
    shown = [one for one in figures if (one["tokens"], one["pool_mib"], one["tile"]) == largest]
    words = [one["setup"] for one in shown]
    kinds = {"copy_gb_s": "plain copy", "driven_gb_s": "relayout, driven", "layer_by_layer_gb_s": "layer by layer"}
    return Results(
        command=command,
        what=_WHAT.format(device=device).replace("\n", " "),
        tables=(Table("All setups", _COLUMNS, rows),),
        charts=(
            Chart(
                f"Relayout of a request of {most:,} tokens",
                "producer → consumer: heads (HND) or tokens (NHD) outermost, tokens of a block",
                "GB/s read and written",
                [Series(text, words, [one[name] for one in shown]) for name, text in kinds.items()],
            ),
        ),
        targets=(
            Target.at_least("the lowest share of a plain copy's bandwidth", min(shares), MIN_COPY_SHARE, ""),
            Target.at_least("the lowest ratio over layer by layer", min(ratios), MIN_PEER_RATIO, "×"),
        )
        if on_gpu
        else (),
        notes=(
            f"Of the copy: {min(shares):.0%} to {max(shares):.0%}, geometric mean {_mean(shares):.0%}; "
            f"over layer by layer: {min(ratios):.1f} to {max(ratios):.1f}.",
            *(() if on_gpu else ("Limits are promised for a GPU only; there are no figures of one yet.",)),
        ),
        raw={"device": device, "figures": list(figures)},
        quick=quick,
    )


def _mean(values: Sequence[float]) -> float:
    """The geometric one, of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))
