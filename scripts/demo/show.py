"""The demonstration from its first engine to its last line."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from scripts.accuracy.client import Answer, Client
from scripts.accuracy.engines import Engine, EngineSpec, Router
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.model import prepare
from scripts.accuracy.prompts import Case
from scripts.accuracy.settings import Settings
from scripts.console import Progress, shown
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
        self._console = Console(width=None if sys.stdout.isatty() else 150)
        self._router_url = self._prometheus_url = ""

    async def go(self) -> int:
        """Start, load, show. Gives the exit status.

        Raises:
            ServerFailed: a server did not start; the text ends with its log.
        """
        prefill, decode = self._start_engines()
        prometheus = self._start_prometheus({engine.spec.name: engine.base_url for engine in (*prefill, *decode)})
        timeout_s = self._settings.request_timeout_s
        from_, to = ([engine.base_url for engine in some] for some in (prefill, decode))
        router = self._stack.enter_context(Router(from_, to, self._folder, timeout_s))
        router.wait_ready(60)
        self._router_url = router.base_url
        async with Client(prefill[0].spec.served_name, timeout_s) as client:
            self._say(f"{_REQUESTS} requests through the router, and one that a slow router hands over")
            answers = await client.ask_all(router.base_url, prompts(_REQUESTS, "demo"), _AT_ONCE)
            answers.append(await hand_over_slowly(client, from_[0], to[0]))
        failed = [answer.error for answer in answers if answer.error]
        time.sleep(_SCRAPES_S)
        panels = self._show_dashboard(prometheus) if prometheus is not None else True
        timelines = self._show_timelines()
        if failed:
            print(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}", file=sys.stderr)
        return 0 if panels and timelines and not failed else 1

    def say_what_to_try(self) -> None:
        """Commands to try now."""
        traces, out = self._folder / "traces", self._folder / "out"
        lines = {
            "ask yourself": f"curl -s {self._router_url}/v1/completions -H 'Content-Type: application/json' \\\n"
            f'{" " * 21}-d \'{{"model": "model", "prompt": "Once upon a time", "max_tokens": 16}}\'',
            "timelines": f".venv/bin/kvferry trace {shown(traces)} -o {shown(out)}",
            "in a browser": shown(out / "waterfall.html"),
            "Prometheus": self._prometheus_url,
            "Grafana": self._prometheus_url
            and "a data source of that address, then import deploy/grafana/kvferry.json",
            "logs": shown(self._folder),
            "end": "Ctrl-C",
        }
        if not self._prometheus_url:
            del lines["Prometheus"], lines["Grafana"]
        print("\n" + "\n".join(f"{name:<16}{text}" for name, text in lines.items()), flush=True)

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
        self._prometheus_url = server.base_url
        self._say(f"Prometheus is ready: {server.base_url}")
        return server

    def _show_dashboard(self, prometheus: Prometheus) -> bool:
        panels = read_panels()
        table = dashboard_table(panels, prometheus.ask)
        self._console.print()
        self._console.print(table)
        self._console.print(f"{table.row_count} of {len(panels)} panels have data: the others count rarer events\n")
        return table.row_count > 0

    def _show_timelines(self) -> bool:
        """As an operator would: the slow request, by its id."""
        traces, out = self._folder / "traces", self._folder / "out"
        command = [str(Path(sys.executable).parent / "kvferry"), "trace", str(traces)]
        print(f"$ kvferry trace {shown(traces)} -o {shown(out)} --slowest 5", flush=True)
        every = subprocess.run([*command, "-o", str(out), "--slowest", "5"], check=False)
        print(f"\n$ kvferry trace {shown(traces)} --request {SLOW}", flush=True)
        slow = subprocess.run([*command, "--request", SLOW], check=False)
        return every.returncode == slow.returncode == 0


def _called_by_name(spec: EngineSpec) -> EngineSpec:
    """An engine whose id is its name, so that people know it again in a timeline."""
    if spec.transfer is None:
        return spec
    return replace(spec, transfer=replace(spec.transfer, engine_id=spec.name))
