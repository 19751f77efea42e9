"""Cost of recording, and of a call that records nothing, in an engine's step threads.

    python -m bench.trace_cost            # a minute
    python -m bench.trace_cost --quick

vLLM's real scheduler drives real connectors at both ends; the model is left out. Three pairs of engines, which record
nothing, in a folder, and in a folder and for OpenTelemetry, take turns: every step of each hands one request over.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

from bench.figures import Results, Table, Target, publish
from bench.provenance import begin
from bench.step_clock import StepClock
from kvferry.trace.events import Event, Finished
from kvferry.trace.recorder import Recorder

_STEPS, _QUICK_STEPS = 600, 150
_WARM_UP = 30
_BLOCKS = 8
_PAUSE_S = 1e-3
_CALLS = 200_000
_RECORDS = 20_000

Pair = tuple[Any, Any]


@contextmanager
def _recording(folder: Path | None, *, spans: bool) -> Iterator[None]:
    """Engines that are made meanwhile record so."""
    from kvferry.connector.config import read_config

    more = {} if folder is None else {"trace_dir": str(folder)}
    with (
        mock.patch("kvferry.connector.connector.read_config", lambda extra, name: read_config({**extra, **more}, name)),
        mock.patch("kvferry.connector.tracing.start.has_opentelemetry_on", return_value=spans),
    ):
        yield


def _provide_spans() -> None:
    """A tracer provider as vLLM makes one; what it exports goes nowhere."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)


class Flow:
    """One pair, one handover a step."""

    def __init__(self, network: Any) -> None:
        from bench.step_engines import Prompts, TimedNode

        self.producer = TimedNode("kv_producer", "memory", network, 128 * _BLOCKS, 512)
        self.consumer = TimedNode("kv_consumer", "memory", network, 128 * _BLOCKS, 512)
        self._prompts = Prompts()
        self._offers: list[tuple[str, list[int]]] = []

    def step(self) -> None:
        name, prompt = self._prompts.next(_BLOCKS)
        self.producer.engine.add(name, prompt, {"do_remote_decode": True}, max_tokens=1)
        self._offers.append((name, prompt))
        answered, tokens = self._offers[0]
        params = self.producer.engine.answers[answered].params
        if params is not None:
            del self._offers[0]
            self.consumer.engine.add(answered, tokens, params, max_tokens=1)
        self.producer.step()
        self.consumer.step()
        time.sleep(_PAUSE_S)  # the transfer threads' turn

    def forget(self) -> None:
        self.producer.forget()
        self.consumer.forget()

    def clocks(self) -> dict[str, StepClock]:
        return {
            "producer's scheduler": self.producer.scheduler_clock,
            "producer's worker": self.producer.worker_clock,
            "consumer's scheduler": self.consumer.scheduler_clock,
            "consumer's worker": self.consumer.worker_clock,
        }

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def _measure(steps: int, folder: Path) -> dict[str, dict[str, list[int]]]:
    """Processor time of every step, by how it is recorded and by thread."""
    from tests.fakes.memory_fabric import MemoryNetwork

    network = MemoryNetwork()
    flows: dict[str, Flow] = {}
    with ExitStack() as open_flows:
        for name, where, spans in (("off", None, False), ("folder", folder, False), ("folder and spans", folder, True)):
            with _recording(where, spans=spans):
                flows[name] = Flow(network)
            open_flows.callback(flows[name].close)
        for step in range(steps + _WARM_UP):
            for flow in flows.values():
                if step == _WARM_UP:
                    flow.forget()
                flow.step()
        return {
            name: {thread: list(clock.cpu_ns) for thread, clock in flow.clocks().items()}
            for name, flow in flows.items()
        }


def _nothing_ns() -> float:
    """A call that is not recorded, without the loop around it."""
    from kvferry.connector.tracing.scheduler_events import UNTRACED

    tracing: Any = UNTRACED

    def timed(call: Any) -> int:
        began = time.thread_time_ns()
        for _ in range(_CALLS):
            call(None)
        return time.thread_time_ns() - began

    return median(timed(tracing.scheduled) for _ in range(7)) / _CALLS


def _record_us(folder: Path) -> tuple[float, float]:
    """An event made and recorded, on the thread that records; and what its writer takes of the processor for it."""
    from kvferry.trace.events import Part, ProcessStarted
    from kvferry.trace.recorder_file import TraceFile

    started = ProcessStarted(at_ns=1, trace_version=1, part=Part.WORKER, engine_id="e", boot="", host="h", pid=1)
    recorder: Recorder[Event] = Recorder(TraceFile(str(folder), "bench", started))
    recorder.record(Finished(at_ns=1, request="the first"))
    writer = recorder._thread
    assert writer is not None
    assert writer.ident is not None
    clock = time.pthread_getcpuclockid(writer.ident)
    time.sleep(0.5)
    written_s, began = time.clock_gettime(clock), time.thread_time_ns()
    for number in range(_RECORDS):
        recorder.record(Finished(at_ns=time.time_ns(), request=f"cmpl-{number:032x}-0-01234567"))
    took_ns = time.thread_time_ns() - began
    time.sleep(1.5)
    written_s = time.clock_gettime(clock) - written_s
    recorder.close()
    if recorder.num_lost:
        raise RuntimeError(f"{recorder.num_lost} events were lost")
    return took_ns / _RECORDS / 1e3, written_s / _RECORDS * 1e6


def results_of(
    found: Mapping[str, Mapping[str, Sequence[int]]], nothing_ns: float, record_us: tuple[float, float], *, quick: bool
) -> Results:
    """Tables and targets."""
    off = found["off"]
    rows = []
    for thread, samples in off.items():
        row: list[str | float] = [thread, round(median(samples) / 1e3, 1)]
        more = (median(found[name][thread]) - median(samples) for name in ("folder", "folder and spans"))
        row += [round(ns / 1e3, 1) for ns in more]
        rows.append(row)
    threads = Table(
        "Processor time of a step that hands one request over",
        ("thread", "nothing recorded, p50, µs", "in a folder, µs more", "and as spans, µs more"),
        rows,
    )
    single = Table(
        "One event",
        ("what", "time"),
        [
            ["a call that is not recorded, ns", round(nothing_ns)],
            ["an event made and recorded, µs", round(record_us[0], 2)],
            ["the same on the writer's thread, µs", round(record_us[1], 2)],
        ],
    )
    most = max(median(found["folder"][thread]) - median(samples) for thread, samples in off.items()) / 1e3
    return Results(
        command="python -m bench.trace_cost",
        what="What recording costs the step threads, with one handover in every step, and what it costs to be off.",
        tables=(threads, single),
        targets=(
            Target.at_most("a call that is not recorded", round(nothing_ns), 200, "ns"),
            Target.at_most("recorded in a folder, the step thread that pays most", round(most, 1), 60.0, "µs"),
        ),
        notes=(
            "Off, a step makes one such call, and a handover about eight more on both engines together.",
            f"Means over steps, µs: {_means(found)}.",
        ),
        quick=quick,
    )


def _means(found: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    return "; ".join(
        f"{name}: {', '.join(f'{fmean(samples) / 1e3:.1f}' for samples in by_thread.values())}"
        for name, by_thread in found.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    asked = parser.parse_args()
    started = begin()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    _provide_spans()
    with tempfile.TemporaryDirectory() as folder:
        nothing_ns, record_us = _nothing_ns(), _record_us(Path(folder))
        found = _measure(_QUICK_STEPS if asked.quick else _STEPS, Path(folder))
    publish("trace_cost", results_of(found, nothing_ns, record_us, quick=asked.quick), started)
    os._exit(0)


if __name__ == "__main__":
    main()
