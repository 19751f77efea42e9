"""The demonstration: engines, router and Prometheus, some load with one slow request, and what can be seen of it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from scripts.accuracy.client import Answer, Client
from scripts.accuracy.engines import Engine, EngineSpec, Router
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.model import ConversionFailed, prepare
from scripts.accuracy.processes import ServerFailed
from scripts.accuracy.prompts import Case
from scripts.accuracy.settings import BadSetting, Settings, read_settings
from scripts.console import STOPPED, Progress, raise_when_stopped, shown
from scripts.demo.dashboard import Prometheus, dashboard_table, program, read_panels

SLOW = "demo-slow"
"""The id of the slow request, which both engines' ids contain."""
SLOW_S = 1.5
_REQUESTS = 30
_AT_ONCE = 3
_LENGTHS = (48, 130, 300, 520, 760)
_TOKENS = range(100, 40_000)
_SCRAPES_S = 3.0
"""For Prometheus to see the last requests, and for the recorders to write theirs."""


def prompts(count: int, seed: str) -> list[Case]:
    """So many prompts of random tokens, the same for the same seed."""
    chooser = random.Random(seed)
    return [
        Case(f"{seed}-{number}", tuple(chooser.choices(_TOKENS, k=_LENGTHS[number % len(_LENGTHS)])), max_tokens=8)
        for number in range(count)
    ]


async def hand_over_slowly(client: Client, prefill: str, decode: str) -> Answer:
    """One request as a router sends it that dozes between the two engines."""
    (case,) = prompts(1, SLOW)
    params = await client.prefill(prefill, case, request_id=SLOW)
    await asyncio.sleep(SLOW_S)
    return await client.ask(decode, case, kv_transfer_params=params, request_id=SLOW)


class Demo:
    """Everything that it starts is in `stack` and ends with it."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._say = Progress().say
        self._folder = settings.log_dir / "demo" / time.strftime("%Y%m%d-%H%M%S")

    async def go(self) -> bool:
        """Start, load, show. Whether everything was answered and shown.

        Raises:
            ServerFailed: a server did not start; the text ends with its log.
        """
        prefill, decode = self._start_engines()
        prometheus = self._start_prometheus({engine.spec.name: engine.base_url for engine in (*prefill, *decode)})
        timeout_s = self._settings.request_timeout_s
        from_, to = ([engine.base_url for engine in some] for some in (prefill, decode))
        router = self._stack.enter_context(Router(from_, to, self._folder, timeout_s))
        router.wait_ready(60)
        async with Client(prefill[0].spec.served_name, timeout_s) as client:
            self._say(f"{_REQUESTS} requests through the router, and one that a slow router hands over")
            answers = await client.ask_all(router.base_url, prompts(_REQUESTS, "demo"), _AT_ONCE)
            answers.append(await hand_over_slowly(client, from_[0], to[0]))
        failed = [answer.error for answer in answers if answer.error]
        time.sleep(_SCRAPES_S)
        panels = prometheus is None or _show_dashboard(prometheus)
        timelines = self._show_timelines()
        if failed:
            print(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}", file=sys.stderr)
        print(f"\nThe router: {router.base_url}/v1/completions, model `model`. Logs: {shown(self._folder)}")
        if prometheus is not None:
            print(f"Prometheus: {prometheus.base_url}; a data source for Grafana and deploy/grafana/kvferry.json")
        return panels and timelines and not failed

    def _start_engines(self) -> tuple[list[Engine], list[Engine]]:
        config = {**self._settings.extra_config, "trace_dir": str(self._folder / "traces")}
        model = prepare(self._settings.models[0], self._settings.cache_dir, self._say)
        fleet = plan_fleet(replace(self._settings, extra_config=config), model, os.environ)
        engines = f"{len(fleet.prefill)} prefill and {len(fleet.decode)} decode engines"
        self._say(f"start {engines}; logs: {shown(self._folder)}")
        prefill, decode = (
            [self._stack.enter_context(Engine(_called_by_name(spec), self._folder)) for spec in specs]
            for specs in (fleet.prefill, fleet.decode)
        )
        for engine in (*prefill, *decode):
            engine.wait_ready(self._settings.start_timeout_s)
            self._say(f"{engine.name} is ready: {engine.base_url}")
        return prefill, decode

    def _start_prometheus(self, engines: dict[str, str]) -> Prometheus | None:
        command = program()
        if command is None:
            self._say("no Prometheus here (Debian: apt-get install prometheus): the dashboard is not shown")
            return None
        server = self._stack.enter_context(Prometheus(command, engines, self._folder / "prometheus"))
        server.wait_ready(30, "/-/ready")
        return server

    def _show_timelines(self) -> bool:
        """As an operator would: the slow request, by its id."""
        traces, out = shown(self._folder / "traces"), shown(self._folder / "out")
        commands = (["trace", traces, "-o", out, "--slowest", "5"], ["trace", traces, "--request", SLOW])
        for command in commands:
            print(f"\n$ kvferry {' '.join(command)}", flush=True)
            if subprocess.run([Path(sys.executable).parent / "kvferry", *command], check=False).returncode:
                return False
        return True


def _show_dashboard(prometheus: Prometheus) -> bool:
    panels = read_panels()
    table = dashboard_table(panels, prometheus.ask)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"{table.row_count} of {len(panels)} panels have data: the others count rarer events")
    return table.row_count > 0


def _called_by_name(spec: EngineSpec) -> EngineSpec:
    """An engine whose id is its name, so that people know it again in a timeline."""
    if spec.transfer is None:
        return spec
    return replace(spec, transfer=replace(spec.transfer, engine_id=spec.name))


def main(arguments: Sequence[str]) -> int:
    """Entry point; `--once` ends when everything has been shown, scripts/run_demo.sh checks what it is given.

    Exit status: 0 all is well, 1 something was not shown, 2 a setting is wrong, 3 a server failed.
    """
    raise_when_stopped()
    try:
        with ExitStack() as stack:
            status = 0 if asyncio.run(Demo(read_settings(os.environ), stack).go()) else 1
            if "--once" not in arguments:
                print("Everything stays up until Ctrl-C.", flush=True)
                while True:
                    time.sleep(3600)
            return status
    except BadSetting as error:
        print(error, file=sys.stderr)
        return 2
    except (ServerFailed, ConversionFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
