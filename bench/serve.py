"""Real vLLM engines: kvferry beside vLLM's NixlConnector and a single engine, on the same prompts, in one run.

    python -m bench.serve                      # about 20 minutes on two cores
    python -m bench.serve --quick              # under 4 minutes, for orientation
    python -m bench.serve --only single,kvferry

Setups run one after another, every engine on one core. It writes `results/serve.json`; a setup that fails loses its own
figures, and the notes say why. Ctrl-C ends all servers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import serve_report
from bench.figures import Results, publish
from bench.serve_contact import measure_contacts
from bench.serve_figures import ContactFigures, SetupFigures
from bench.serve_load import Tick
from bench.serve_measure import LENGTHS, Amounts, measure
from bench.serve_setups import CALM, KVFERRY, SETUPS, SHIPPED, SINGLE, started
from scripts.accuracy.model import ConversionFailed, prepare
from scripts.accuracy.settings import ROOT
from scripts.accuracy.variables import DEFAULT_MODEL
from scripts.small_models import default_cache_dir

FULL = {
    SINGLE.name: Amounts(routed=200, direct=0, crowd=32),
    KVFERRY.name: Amounts(routed=200, direct=100, crowd=32),
    CALM.name: Amounts(routed=20, direct=100, crowd=32, budget_s=150.0),
    SHIPPED.name: Amounts(routed=6, direct=6, crowd=8, timeout_s=45.0, budget_s=45.0),
}
QUICK = {
    name: replace(
        amounts,
        routed=min(12, amounts.routed),
        direct=min(12, amounts.direct),
        crowd=8,
        watch_s=3.0,
        lengths=LENGTHS[:3],
        weights=(1, 1, 1),
        timeout_s=20.0,
        budget_s=15.0,
    )
    for name, amounts in FULL.items()
}
CONTACT = "contact"
_CONTACT_PAIRS = 3
_QUICK_SETUPS = (SINGLE.name, KVFERRY.name, CALM.name)

WHAT = (
    "What a client sees of a handover between real engines behind vllm-router, and what engines take while they are "
    "idle: kvferry, the peer and a single engine, in turn on the same prompts. "
    "Two vLLM engines on one core each, SmolLM2-135M in float32, prompts of random tokens that no cache knows, greedy "
    "answers of 8 tokens, streamed. The single engine has one such core too. Handover: from the producer's answer to "
    "the first token out of the decoder, where the client sends both requests as the router does; all other times are "
    "through vllm-router. The peer has UCX_MM_ERROR_HANDLING=y as well. All engines begin with PyTorch's ordinary "
    "pages; kvferry moves its caches into huge ones."
)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    names = [setup.name for setup in SETUPS]
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few prompts; not the peer as shipped, no deep engines")
    parser.add_argument("--only", help=f"some of {','.join(names)},{CONTACT}")
    parser.add_argument("--logs", type=Path, default=ROOT / "logs" / "serve", help="[%(default)s]")
    chosen = parser.parse_args(arguments)
    wanted = chosen.only.split(",") if chosen.only else list(_QUICK_SETUPS) if chosen.quick else [*names, CONTACT]
    if unknown := set(wanted) - {*names, CONTACT}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(names)}, {CONTACT}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = _run(wanted, chosen.logs, quick=chosen.quick)
    except KeyboardInterrupt:
        print("interrupted; all servers have ended", file=sys.stderr)
        return 130
    except ConversionFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    publish("serve", results)
    return 0


def _run(wanted: Sequence[str], logs: Path, *, quick: bool) -> Results:
    amounts = QUICK if quick else FULL
    pairs = 1 if quick else _CONTACT_PAIRS
    model = prepare(DEFAULT_MODEL, default_cache_dir(), print)
    setups = {setup.name: SetupFigures(setup) for setup in SETUPS if setup.name in wanted}
    contacts = {setup.name: ContactFigures(setup) for setup in (KVFERRY, CALM)} if CONTACT in wanted else {}
    began_s = time.monotonic()
    columns = (TextColumn("{task.description:58}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for figures in setups.values():
            tell, tick = _shown(progress, figures.setup.title, amounts[figures.setup.name].total)
            try:
                asyncio.run(_measure(figures, model, logs, amounts[figures.setup.name], tell, tick))
            except Exception as error:  # noqa: BLE001 - only its own figures are lost; the notes say why
                figures.error = _short(error)
        for deep in contacts.values():
            tell, tick = _shown(progress, f"first contact, {deep.setup.title}", 3 * (pairs + 1))
            try:
                asyncio.run(measure_contacts(deep, pairs, logs, tell, tick))
            except Exception as error:  # noqa: BLE001 - as above
                deep.error = _short(error)
    command = "python -m bench.serve" + (" --quick" if quick else "")
    return Results(
        command=command,
        what=WHAT,
        tables=serve_report.tables(setups, contacts),
        charts=serve_report.charts(setups),
        targets=serve_report.targets(setups, contacts),
        notes=serve_report.notes(setups, contacts, time.monotonic() - began_s),
        raw={
            "setups": {name: figures.raw() for name, figures in setups.items()},
            "contacts": {name: figures.raw() for name, figures in contacts.items()},
        },
        quick=quick,
    )


async def _measure(
    figures: SetupFigures, model: str, logs: Path, amounts: Amounts, tell: Callable[[str], None], tick: Tick
) -> None:
    tell("start")
    began_s = time.monotonic()
    with started(figures.setup, model, logs, 2 * amounts.timeout_s) as running:
        figures.start_s = time.monotonic() - began_s
        await measure(running, amounts, figures, tell, tick)
        tell("done")


def _shown(progress: Progress, title: str, total: int) -> tuple[Callable[[str], None], Tick]:
    """What to call with each part's name, and with each request."""
    task = progress.add_task(title, total=total)

    def tell(part: str) -> None:
        progress.update(task, description=f"{title}: {part}")
        if not progress.console.is_terminal:
            progress.console.print(f"{title}: {part}")

    return tell, lambda: progress.advance(task)


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' … '.join([*lines[:1], *lines[-3:]] if len(lines) > 4 else lines)}"[:1000]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
