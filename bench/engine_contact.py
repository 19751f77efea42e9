"""First contacts between real vLLM engines of 5,500 blocks and 30 layers: kvferry beside vLLM's NixlConnector.

    python -m bench.engine_contact            # about 10 minutes on two cores
    python -m bench.engine_contact --quick    # one pair each, 3 minutes

One producer and three consumers at a time, each contacting it once; the connectors take turns. It writes
`results/engine_contact.json`. Ctrl-C ends all servers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.figures import Cell, Results, Table, Target, publish
from bench.provenance import begin
from bench.serve_contact import QUIET_S, measure_contacts
from bench.serve_figures import ContactFigures, median
from bench.serve_progress import progress_bars, short, shown
from bench.serve_setups import CALM, KVFERRY
from scripts.accuracy.settings import ROOT

LIMIT = 0.25
_ROUNDS = 2
_CONSUMERS = 3
WHAT = (
    "What the first handover between two vLLM engines takes longer than those that follow. Engines of 5,500 blocks and "
    "30 layers of a tiny model, one core for each; the client sends both requests as a router does. Every engine has "
    "answered before, by itself, and none is busy."
)
By = Mapping[str, ContactFigures]
"""Figures by the setup's name."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine_contact", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="one pair of engines for each connector")
    parser.add_argument("--logs", type=Path, default=ROOT / "logs" / "engine_contact", help="[%(default)s]")
    chosen = parser.parse_args(arguments)
    started = begin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        publish("engine_contact", _run(chosen.logs, quick=chosen.quick), started)
    except KeyboardInterrupt:
        print("interrupted; all servers have ended", file=sys.stderr)
        return 130
    return 0


def _run(logs: Path, *, quick: bool) -> Results:
    rounds, consumers = (1, 1) if quick else (_ROUNDS, _CONSUMERS)
    found = {setup.name: ContactFigures(setup) for setup in (KVFERRY, CALM)}
    began_s = time.monotonic()
    with progress_bars() as progress:
        for number in range(rounds):
            for figures in found.values():
                tell, tick = shown(progress, f"{figures.setup.title}, {number + 1} of {rounds}", 3 * (consumers + 1))
                try:
                    asyncio.run(measure_contacts(figures, consumers, logs / str(number), tell, tick))
                except Exception as error:  # noqa: BLE001 - only its own figures are lost; the notes say why
                    figures.error = short(error)
    return Results(
        command="python -m bench.engine_contact" + (" --quick" if quick else ""),
        what=WHAT,
        tables=(table(found), singly(found)),
        charts=(),
        targets=targets(found),
        notes=notes(found, time.monotonic() - began_s),
        raw={name: figures.raw() for name, figures in found.items()},
        quick=quick,
    )


def table(found: By) -> Table:
    """A connector a row."""
    rows: list[Sequence[Cell]] = []
    for many in found.values():
        if many.contacts:
            extra = [1e3 * contact.extra_s for contact in many.contacts]
            first = 1e3 * median(contact.first_s for contact in many.contacts)
            warm = 1e3 * median(warm_s for contact in many.contacts for warm_s in contact.warm_s)
            spread = f"{min(extra):.0f}–{max(extra):.0f}"
            rows.append([many.setup.title, len(extra), first, warm, 1e3 * many.extra_s, spread])
    columns = ("", "pairs", "first handover", "warm handover", "extra", "range of extra")
    return Table("First contact between engines: ms, medians", columns, rows)


def singly(found: By) -> Table:
    """A pair of engines a row: what looks like an outlier can be seen to be one, or not."""
    rows: list[Sequence[Cell]] = []
    for many in found.values():
        for number, contact in enumerate(many.contacts, 1):
            warm = " ".join(f"{1e3 * one:.0f}" for one in contact.warm_s)
            rows.append([many.setup.title, number, 1e3 * contact.first_s, warm])
    return Table("Pair by pair: ms", ("", "pair", "first handover", "those that follow"), rows)


def targets(found: By) -> tuple[Target, ...]:
    """The share of the peer's time."""
    ours, peer = found[KVFERRY.name], found[CALM.name]
    target = Target.at_most(
        f"first contact, {ours.blocks:,} blocks × {ours.layers} layers",
        1e3 * ours.extra_s,
        1e3 * LIMIT * peer.extra_s,
        "ms",
        "a quarter of the event-driven peer's; beyond a warm handover",
    )
    return (target,)


def notes(found: By, seconds: float) -> tuple[str, ...]:
    """Notes beside the figures."""
    said = [
        f"All of it took {seconds / 60:.1f} minutes. The producer has a core, the consumers share the other one; one "
        "of them is asked at a time.",
        f"Before each first contact the engines are left alone for {QUIET_S:g} s: vLLM's processes poll for a second "
        "after every message, and those of another consumer would take the core. Without that, first and later "
        "handovers of either connector take up to 0.4 s, in any of their phases.",
        "The peer as shipped is left out: its four workers would spin on two cores.",
    ]
    for many in found.values():
        if many.error:
            said.append(f"{many.setup.title} ended early: {many.error}")
        said += [f"{many.setup.title}, its log: {line}" for line in many.said]
    return tuple(said)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
