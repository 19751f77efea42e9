"""Published results of `bench.plan`: its table, a chart beside the published way, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Chart, Results, Series, Table, Target

MAX_PLAN_MS, MAX_PLAN_MB, MAX_REQUEST_MS = 50.0, 16.0, 1.0
"""Limits of a consumer worker's time and memory, per peer and per request."""

_WHAT = """\
What one worker of a decode engine prepares when it meets a prefill engine, and for every request: the plan, the
tables of descriptors, the index arrays. Beside it, in the same run, the way in which vLLM's NixlConnector makes its
descriptors. A Llama of 80 layers, tensor parallel 8 to 4 and 4 to 8, {blocks:,} blocks in every worker's cache."""
_NOTES = (
    "Times are processor time of the one thread that works, the best of several; medians are in the JSON.",
    "The published way is given fewer blocks, as at full size it would hold gigabytes, and is scaled; it refuses "
    "blocks with tokens outermost (NHD) for tensor-parallel sizes that differ.",
)


def results_of(cases: Sequence[dict[str, Any]], quick: bool) -> Results:
    """From the figures of all cases, as `bench.plan.run` returns them."""
    ours = [case["ours"] for case in cases]
    ours_ms = [one["plan_and_tables_ms"] + (one["nixl_prep_ms"] or 0.0) for one in ours]
    theirs_ms = [case["published"] and 1e3 * case["published"]["seconds_at"] for case in cases]
    words = [case["case"] for case in cases]
    rows = [
        [
            case["case"],
            one["placing"],
            one["plan_and_tables_ms"],
            one["nixl_prep_ms"],
            one["peak_mb"],
            one["request_ms"],
            theirs,
            case["published"] and case["published"]["peak_mb_at"],
            case["published"] and case["published"]["request_ms"],
            theirs and theirs / total,
        ]
        for case, one, total, theirs in zip(cases, ours, ours_ms, theirs_ms, strict=True)
    ]
    return Results(
        command="python -m bench.plan" + " --quick" * quick,
        what=_WHAT.format(blocks=cases[0]["blocks"]).replace("\n", " "),
        tables=(Table("One consumer worker and one peer", _COLUMNS, rows),),
        charts=(
            Chart(
                "Meeting a peer: plan, tables and NIXL's preparation",
                "memory layout, tensor parallel of producer → consumer",
                "ms of processor time",
                (Series("kvferry", words, ours_ms), Series("published way", words, theirs_ms)),
                y_log=True,
            ),
        ),
        targets=(
            _worst("plan and tables of a peer", [one["plan_and_tables_ms"] for one in ours], MAX_PLAN_MS, "ms"),
            _worst("memory for that", [one["peak_mb"] for one in ours], MAX_PLAN_MB, "MB"),
            _worst("index arrays of an 8,192-token request", [one["request_ms"] for one in ours], MAX_REQUEST_MS, "ms"),
        ),
        notes=_NOTES,
        raw={"cases": list(cases)},
        quick=quick,
    )


_COLUMNS = (
    "pair",
    "placed",
    "plan and tables, ms",
    "NIXL, ms",
    "memory, MB",
    "a request, ms",
    "published: tables and NIXL, ms",
    "memory, MB",
    "a request, ms",
    "ratio",
)


def _worst(name: str, measured: Sequence[float], limit: float, unit: str) -> Target:
    return Target.at_most(
        f"{name}, the slowest case" if unit == "ms" else f"{name}, the most", max(measured), limit, unit
    )
