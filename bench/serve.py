"""Real vLLM engines behind vllm-router: kvferry in both ways, vLLM's NixlConnector and a single engine, in turn.

    python -m bench.serve
    python -m bench.serve --quick                  # 5 minutes, for orientation
    python -m bench.serve --quick kvferry single   # these setups only
    python -m bench.serve --device cuda            # on one GPU or two; not run on any yet

All servers live at the same time, and only those whose turn it is run. It writes `results/serve.json`; a setup that
fails loses its own figures, and the notes say why. Ctrl-C ends all servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import serve_report
from bench.command import command, measure_and_publish
from bench.figures import Results
from bench.serve_figures import CROWD, SATURATING, SetupFigures
from bench.serve_load import NO_LOGPROBS
from bench.serve_measure import Amounts, Lane, measure
from bench.serve_setups import SETUPS, Running, Setup, short, started
from scripts.accuracy.client import Client
from scripts.accuracy.model import default_cache_dir, prepare
from scripts.accuracy.settings import DEFAULT_MODEL, ROOT

_PROMPTS = {1: 1, CROWD: 16, SATURATING: 32}
FULL = Amounts({1: 78, CROWD: 6, SATURATING: 6}, _PROMPTS, watch_s=10.0, timeout_s=60.0)
QUICK = Amounts({1: 13, CROWD: 1, SATURATING: 1}, _PROMPTS, watch_s=3.0, timeout_s=60.0)

WHAT = (
    "What a client sees of a handover between real engines behind vllm-router, and what engines take while they are "
    "idle: kvferry with both legs of a request at once and one after the other, the peer, and a single engine. They "
    "take turns prompt by prompt, and the servers of the others are stopped meanwhile. {}, prompts of random tokens "
    "that no cache knows, 128 of them prefilled in a step, greedy answers of 8 tokens, streamed. The single engine has "
    "one such {} too. Handover: from the producer's HTTP answer, timed in its server, to the first token at the client."
)
ENGINES = {
    "cpu": ("Two vLLM engines on one core each, SmolLM2-135M in float32", "core"),
    "cuda": (
        "Two vLLM engines on a GPU each, or both on one, SmolLM2-135M in bfloat16",
        "GPU",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = command("serve", __doc__, "few prompts")
    names = [setup.name for setup in SETUPS]
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the engines run"
    )
    parser.add_argument(
        "setups", nargs="*", help=f"with --quick: some of {', '.join(names)}"
    )
    chosen = parser.parse_args(arguments)
    if set(chosen.setups) - set(names) or (chosen.setups and not chosen.quick):
        parser.error(f"setups: with --quick, of {', '.join(names)}")
    compared = [setup for setup in SETUPS if setup.name in (chosen.setups or names)]
    logs = ROOT / "logs" / "serve"
    return measure_and_publish(
        "serve" if chosen.device == "cpu" else "serve-cuda",
        lambda: run(compared, logs, quick=chosen.quick, device=chosen.device),
    )


def run(
    compared: Sequence[Setup], logs: Path, *, quick: bool, device: str = "cpu"
) -> Results:
    """Measure these setups, in turn."""
    amounts = QUICK if quick else FULL
    model = prepare(DEFAULT_MODEL, default_cache_dir(), print)
    setups = {setup.name: SetupFigures(setup) for setup in compared}
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for name, figures in setups.items():
            print(f"starting: {figures.setup.title}", flush=True)
            try:
                running[name] = stack.enter_context(
                    started(figures.setup, model, logs, 2 * amounts.timeout_s, device)
                )
            except Exception as error:  # noqa: BLE001 - only its own figures are lost; the notes say why
                figures.error = short(error)
        asyncio.run(
            _measure([(setups[name], one) for name, one in running.items()], amounts)
        )
    return Results(
        command="python -m bench.serve"
        + " --quick" * quick
        + f" --device {device}" * (device != "cpu"),
        what=WHAT.format(*ENGINES[device]),
        tables=serve_report.tables(setups),
        charts=serve_report.charts(setups),
        targets=serve_report.targets(setups),
        notes=serve_report.notes(setups, device),
        quick=quick,
    )


async def _measure(
    compared: Sequence[tuple[SetupFigures, Running]], amounts: Amounts
) -> None:
    async with Client("model", amounts.timeout_s, always=NO_LOGPROBS) as client:
        await measure(
            [
                Lane(figures, one, client, amounts.timeout_s)
                for figures, one in compared
            ],
            amounts,
        )


if __name__ == "__main__":
    raise SystemExit(main())
