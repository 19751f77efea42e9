"""Processor time of an engine's processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import psutil

from scripts.accuracy.engines import Engine

Cores = Mapping[str, float]
"""Processor seconds per second, by process; `all` is their sum."""


def cores_used(engines: Iterable[Engine], seconds: float) -> dict[str, Cores]:
    """Watch the processes of some engines for a while; by the engines' names."""
    found = {engine.spec.name: _processes(engine) for engine in engines}
    before, began_s = _times(found), time.monotonic()
    time.sleep(seconds)
    after, took_s = _times(found), time.monotonic() - began_s
    used: dict[str, Cores] = {}
    for name, times in after.items():
        by_process = {each: (spent_s - before[name][each]) / took_s for each, spent_s in times.items()}
        used[name] = {**by_process, "all": sum(by_process.values())}
    return used


def _processes(engine: Engine) -> list[psutil.Process]:
    first = psutil.Process(engine.pid)
    return [first, *first.children(recursive=True)]


def _times(found: Mapping[str, list[psutil.Process]]) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, float]] = {}
    for name, processes in found.items():
        times[name] = {}
        for process in processes:
            spent = process.cpu_times()
            kind = _kind(process)
            times[name][kind] = times[name].get(kind, 0.0) + spent.user + spent.system
    return times


def _kind(process: psutil.Process) -> str:
    """Kind of a vLLM process: the server, the engine's core, a worker."""
    title = " ".join(process.cmdline())
    for word, kind in (("EngineCore", "engine core"), ("Worker", "worker"), ("api_server", "server")):
        if word in title:
            return kind
    return "other"
