"""The demonstration from its first engine to its last line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from scripts.accuracy.client import Client
from scripts.accuracy.engines import Engine, EngineSpec
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.model import prepare
from scripts.accuracy.router import Router
from scripts.accuracy.settings import Settings
from scripts.demo.load import SLOW, drive, hand_over_slowly, prompts
from scripts.demo.panels import dashboard_table, read_panels
from scripts.demo.prometheus import Prometheus, program

_REQUESTS = 30
_AT_ONCE = 3
_SCRAPES_S = 3.0
"""For Prometheus to see the last requests, and for the recorders to write theirs."""


class Demo:
    """Everything that it starts is in `stack` and ends with it."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._began_s = time.monotonic()
        self._folder = settings.log_dir / "demo" / time.strftime("%Y%m%d-%H%M%S")
        self._traces, self._out = self._folder / "traces", self._folder / "out"
        self._console = Console(width=None if sys.stdout.isatty() else 150)
        self._router_url = self._prometheus_url = ""

    async def go(self) -> int:
        """Start, load, show. Gives the exit status.

        Raises:
            ServerFailed: a server did not start; the text ends with its log.
        """
        prefill, decode = self._start_engines()
        engines = {engine.spec.name: engine.base_url for engine in (*prefill, *decode)}
        prometheus = self._start_prometheus(engines)
        timeout_s = self._settings.request_timeout_s
        from_, to = ([engine.base_url for engine in some] for some in (prefill, decode))
        router = self._stack.enter_context(Router(from_, to, self._folder, timeout_s))
        router.wait_ready(60)
        self._router_url = router.base_url
        async with Client(prefill[0].spec.served_name, timeout_s) as client:
            self._print(f"{_REQUESTS} requests through the router, and one that a slow router hands over")
            answers = await drive(client, router.base_url, prompts(_REQUESTS, "demo"), _AT_ONCE)
            answers.append(await hand_over_slowly(client, from_[0], to[0]))
        failed = [answer.error for answer in answers if answer.error]
        time.sleep(_SCRAPES_S)
        shown = self._show_dashboard(prometheus) if prometheus is not None else True
        found = self._show_timelines()
        if failed:
            print(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}", file=sys.stderr)
        return 0 if shown and found and not failed else 1

    def tell_how_to_go_on(self) -> None:
        """Commands to try now."""
        lines = [
            f"ask yourself    curl -s {self._router_url}/v1/completions -H 'Content-Type: application/json' \\",
            '                     -d \'{"model": "model", "prompt": "Once upon a time", "max_tokens": 16}\'',
            f"timelines       .venv/bin/kvferry trace {_shown(self._traces)} -o {_shown(self._out)}",
            f"in a browser    {_shown(self._out / 'waterfall.html')}",
        ]
        if self._prometheus_url:
            lines += [
                f"Prometheus      {self._prometheus_url}",
                "Grafana         a data source of that address, then import deploy/grafana/kvferry.json",
            ]
        print(
            "\n" + "\n".join([*lines, f"logs            {_shown(self._folder)}", "end             Ctrl-C"]), flush=True
        )

    def _start_engines(self) -> tuple[list[Engine], list[Engine]]:
        config = {**self._settings.extra_config, "trace_dir": str(self._traces)}
        model = prepare(self._settings.models[0], self._settings.cache_dir, self._print)
        fleet = plan_fleet(replace(self._settings, extra_config=config), model, os.environ)
        self._print(
            f"start {len(fleet.prefill)} prefill and {len(fleet.decode)} decode engines; logs: {_shown(self._folder)}"
        )
        prefill, decode = (
            [self._stack.enter_context(Engine(_called_by_name(spec), self._folder)) for spec in specs]
            for specs in (fleet.prefill, fleet.decode)
        )
        for engine in (*prefill, *decode):
            engine.wait_ready(self._settings.start_timeout_s)
            self._print(f"{engine.name} is ready: {engine.base_url}")
        return prefill, decode

    def _start_prometheus(self, engines: dict[str, str]) -> Prometheus | None:
        command = program()
        if command is None:
            self._print("no Prometheus here (Debian: apt-get install prometheus): the dashboard is not shown")
            return None
        server = self._stack.enter_context(Prometheus(command, engines, self._folder / "prometheus"))
        server.wait_ready(30, "/-/ready")
        self._prometheus_url = server.base_url
        self._print(f"Prometheus is ready: {server.base_url}")
        return server

    def _show_dashboard(self, prometheus: Prometheus) -> bool:
        panels = read_panels()
        table = dashboard_table(panels, prometheus.ask)
        self._console.print()
        self._console.print(table)
        self._console.print(f"{table.row_count} of {len(panels)} panels have data: the others count rarer events\n")
        return table.row_count > 0

    def _show_timelines(self) -> bool:
        """As an operator would: the slow request, by the name that its client gave it."""
        command = [str(Path(sys.executable).parent / "kvferry"), "trace", str(self._traces)]
        print(f"$ kvferry trace {_shown(self._traces)} -o {_shown(self._out)} --slowest 5", flush=True)
        every = subprocess.run([*command, "-o", str(self._out), "--slowest", "5"], check=False)
        print(f"\n$ kvferry trace {_shown(self._traces)} --request {SLOW}", flush=True)
        slow = subprocess.run([*command, "--request", SLOW], check=False)
        return every.returncode == slow.returncode == 0

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


def _called_by_name(spec: EngineSpec) -> EngineSpec:
    """An engine whose id is its name, so that people know it again in a timeline."""
    if spec.transfer is None:
        return spec
    return replace(spec, transfer=replace(spec.transfer, engine_id=spec.name))


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
