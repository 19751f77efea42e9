"""kvferry's Grafana dashboard: what is shown, and `deploy/grafana/kvferry.json` made from it.

python -m scripts.dashboard            # write
python -m scripts.dashboard --check    # exit 1 when the file is out of date; a test compares too
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.dashboard_leases import LEASES, QUARANTINE, SIDE_CHANNEL, TURNS
from scripts.dashboard_loads import FAILURES, HANDOVER, PRODUCERS, TRANSFER
from scripts.dashboard_parts import (
    Panel,
    Query,
    Row,
    dashboard_json,
    growth,
    quantile,
    rate,
    total,
)

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "kvferry.json"

_RECOMPUTES = "kvferry_local_recomputes_total"
# A load that failed was counted as a load before: it is not to be counted twice.
_NOT_LOADED = rate(_RECOMPUTES, labels='reason!="load_failed"')
_WITH_PARAMS = f"({rate('kvferry_loads_total')} + {_NOT_LOADED})"
_SHARE_COMPUTED = f"{rate(_RECOMPUTES)} / clamp_min({_WITH_PARAMS}, 1e-9)"

OVERVIEW = Row(
    "At a glance",
    (
        Panel(
            "Loads a second",
            "Prompts ordered to be loaded from another engine.",
            "ops",
            (Query(rate("kvferry_loads_total"), "loads"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Handover, p99",
            "From a prompt's arrival at the decoder until its blocks were loaded.",
            "s",
            (Query(quantile(0.99, "kvferry_handover_seconds"), "p99"),),
            kind="stat",
            red_above=2.0,
            width=4,
        ),
        Panel(
            "Computed again",
            "Of the prompts that came with params of another engine, the share that was computed here instead.",
            "percentunit",
            (Query(_SHARE_COMPUTED, "share"),),
            kind="stat",
            red_above=0.1,
            width=4,
        ),
        Panel(
            "Bytes a second",
            "As NIXL counted them, all chosen engines together.",
            "Bps",
            (Query(rate("nixl_bytes_transferred_sum"), "bytes"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Leases now",
            "Leases of prompts and of turns whose blocks are held, which count as used.",
            "short",
            (Query(total("kvferry_leases_held_now"), "held"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Bugs reported",
            "Wrong sums and unreadable orders over the time shown. Anything but 0: report the log line.",
            "short",
            (
                Query(growth("kvferry_integrity_errors_total"), "integrity"),
                Query(growth("kvferry_lost_orders_total"), "orders"),
            ),
            kind="stat",
            red_above=0.5,
            width=4,
        ),
    ),
)

ROWS = (OVERVIEW, HANDOVER, TRANSFER, PRODUCERS, LEASES, TURNS, FAILURES, QUARANTINE, SIDE_CHANNEL)


def as_text() -> str:
    """The contents of the file."""
    described = "KV caches carried from the engines that prefill to the engines that decode."
    return json.dumps(dashboard_json("kvferry", "kvferry", described, ROWS), indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the file."""
    stale = not FILE.exists() or FILE.read_text() != as_text()
    if stale and "--check" in arguments:
        print(f"{FILE} is out of date: run `python -m scripts.dashboard`", file=sys.stderr)
        return 1
    if stale:
        FILE.write_text(as_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
