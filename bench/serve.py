"""Real vLLM engines: kvferry beside vLLM's NixlConnector and a single engine, on the same prompts, in one run.

    python -m bench.serve                      # about 20 minutes on two cores
    python -m bench.serve --quick              # under 4 minutes, for orientation

Setups run one after another, every engine on one core. It writes `results/serve.json`; a setup that fails loses its own
figures, and the notes say why. Ctrl-C ends all servers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import serve_report
from bench.figures import Results, publish
from bench.provenance import begin
from bench.serve_figures import SetupFigures
from bench.serve_measure import LENGTHS, Amounts, measure
from bench.serve_setups import CALM, KVFERRY, SETUPS, SHIPPED, SINGLE, Setup, short, started
from scripts.accuracy.model import ConversionFailed, default_cache_dir, prepare
from scripts.accuracy.settings import DEFAULT_MODEL, ROOT

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

WHAT = (
    "What a client sees of a handover between real engines behind vllm-router, and what engines take while they are "
    "idle: kvferry, the peer and a single engine, in turn on the same prompts. "
    "Two vLLM engines on one core each, SmolLM2-135M in float32, prompts of random tokens that no cache knows, greedy "
    "answers of 8 tokens, streamed. The single engine has one such core too. Handover: from the producer's answer to "
    "the first token out of the decoder, where the client sends both requests as the router does; all other times are "
    "through vllm-router. All engines have huge pages (`THP_MEM_ALLOC_ENABLE=1`)."
)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few prompts; not the peer as shipped")
    quick = parser.parse_args(arguments).quick
    started = begin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run((SINGLE, KVFERRY, CALM) if quick else SETUPS, ROOT / "logs" / "serve", quick=quick)
    except KeyboardInterrupt:
        print("interrupted; all servers have ended", file=sys.stderr)
        return 130
    except ConversionFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    publish("serve", results, started)
    return 0


def run(compared: Sequence[Setup], logs: Path, *, quick: bool) -> Results:
    """Measure these setups, one after the other."""
    amounts = QUICK if quick else FULL
    model = prepare(DEFAULT_MODEL, default_cache_dir(), print)
    setups = {setup.name: SetupFigures(setup) for setup in compared}
    for figures in setups.values():
        try:
            asyncio.run(_measure(figures, model, logs, amounts[figures.setup.name]))
        except Exception as error:  # noqa: BLE001 - only its own figures are lost; the notes say why
            figures.error = short(error)
    return Results(
        command="python -m bench.serve" + " --quick" * quick,
        what=WHAT,
        tables=serve_report.tables(setups),
        charts=serve_report.charts(setups),
        targets=serve_report.targets(setups),
        notes=serve_report.notes(setups),
        quick=quick,
    )


async def _measure(figures: SetupFigures, model: str, logs: Path, amounts: Amounts) -> None:
    with started(figures.setup, model, logs, 2 * amounts.timeout_s) as running:
        await measure(running, amounts, figures)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
