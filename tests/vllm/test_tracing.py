"""Two real servers that record in a folder and tell an OpenTelemetry collector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.trace.events import AnyEvent, Part, ProcessStarted
from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.engines import Transfer
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer, small_server
from tests.vllm.load import Tokens, body_of, prompt_of
from tests.vllm.otlp_receiver import Receiver, receiving
from tests.vllm.pair import post
from tests.waiting import wait_until

PROMPTS = [prompt_of("traced", index) for index in range(3)]
TRACES = [f"{index + 1:032x}" for index in range(len(PROMPTS))]
PARENT = "b7ad6b7169203331"
_DECODER = msgspec.json.Decoder(AnyEvent)


@dataclass(frozen=True)
class Traced:
    """Both servers after their handovers."""

    folder: Path
    receiver: Receiver
    params: list[dict[str, Any]]


def server(name: str, core: str, role: str, logs: Path, endpoint: str, folder: Path) -> ForkedServer:
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "NO_PROXY": "127.0.0.1",
    }
    transfer = Transfer(role, extra_config={"trace_dir": str(folder), "handshake_timeout_s": 15})
    return small_server(name, core, transfer, logs, args=("--otlp-traces-endpoint", endpoint), env=env)


def hand_over(producer: ForkedServer, consumer: ForkedServer, prompt: Tokens, trace: str) -> dict[str, Any]:
    """As a router that passes the client's trace on, and an id of its own. Returns the params."""
    headers = {"traceparent": f"00-{trace}-{PARENT}-01", "X-Request-Id": f"router-{trace}"}
    prefill = body_of(prompt, 1, kv_transfer_params=ASK_FOR_PREFILL)
    answered = post(producer.base_url, prefill, headers=headers)
    assert answered.status_code == 200, answered.text
    params = dict(answered.json()["kv_transfer_params"])
    decode = body_of(prompt, kv_transfer_params=params)
    answered = post(consumer.base_url, decode, headers=headers)
    assert answered.status_code == 200, answered.text
    return params


@pytest.fixture(scope="module")
def traced(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced") / "traces"
    with receiving() as receiver, ExitStack() as running:
        producer, consumer = (
            running.enter_context(server(name, core, role, logs, receiver.endpoint, folder))
            for name, core, role in (("traced-prefill", "0", "kv_producer"), ("traced-decode", "1", "kv_consumer"))
        )
        for engine in (producer, consumer):
            engine.wait_ready(START_S)
        params = [hand_over(producer, consumer, *each) for each in zip(PROMPTS, TRACES, strict=True)]
        spans = {"kvferry.lease": 1, "kvferry.handover": 1, "llm_request": 2}
        wait_until(
            lambda: all(len(receiver.named(name)) == each * len(PROMPTS) for name, each in spans.items()),
            "every handover has its spans and vLLM's",
            timeout_s=60,
        )
        running.close()
        yield Traced(folder, receiver, params)


def files(folder: Path) -> dict[tuple[str, Part], list[Any]]:
    """Events by engine and part."""
    found: dict[tuple[str, Part], list[Any]] = {}
    for path in folder.iterdir():
        started, *events = (_DECODER.decode(line) for line in path.read_bytes().splitlines())
        assert isinstance(started, ProcessStarted)
        assert (started.engine_id, started.part) not in found
        found[started.engine_id, started.part] = events
    return found


def test_every_process_has_a_file_and_every_handover_its_whole_sequence(traced: Traced) -> None:
    (producer,) = {params["remote_engine_id"] for params in traced.params}
    recorded = files(traced.folder)
    assert sorted(part.value for _, part in recorded) == ["scheduler", "scheduler", "worker", "worker"]
    (consumer,) = {engine for engine, _ in recorded} - {producer}
    prefills, decodes = recorded[producer, Part.SCHEDULER], recorded[consumer, Part.SCHEDULER]
    loads = {load.request: load for load in recorded[consumer, Part.WORKER]}
    for params, trace in zip(traced.params, TRACES, strict=True):
        prefill = [event for event in prefills if event.request == params["remote_request_id"]]
        assert [type(event).__name__ for event in prefill] == [
            "PrefillArrived",
            "PrefillScheduled",
            "ParamsGiven",
            "LeaseOver",
        ]
        (arrived,) = [event for event in decodes if getattr(event, "remote_request", "") == prefill[0].request]
        decode = [event for event in decodes if event.request == arrived.request]
        assert [type(event).__name__ for event in decode] == [
            "DecodeArrived",
            "LoadOrdered",
            "LoadReported",
            "DecodeScheduled",
            "Finished",
        ]
        load = loads[arrived.request]
        assert prefill[2].at_ns < arrived.at_ns < load.stages[0].begun_ns < load.at_ns < decode[2].at_ns
        assert arrived.lease == prefill[1].lease
        assert all(f"router-{trace}" in event.request for event in (prefill[0], arrived))
        assert {prefill[0].traceparent, arrived.traceparent} == {f"00-{trace}-{PARENT}-01"}
        assert load.bytes > 0


def test_the_clients_trace_has_the_spans_of_both_engines_beside_vllms_own(traced: Traced) -> None:
    for trace in TRACES:
        spans = {
            name: [span for span in traced.receiver.named(name) if span.trace == trace]
            for name in ("llm_request", "kvferry.lease", "kvferry.handover", "kvferry.load", "kvferry.load.reading")
        }
        assert [span.parent for span in spans["llm_request"]] == [PARENT, PARENT]
        (lease,), (handover,) = spans["kvferry.lease"], spans["kvferry.handover"]
        assert (lease.parent, handover.parent) == (PARENT, PARENT)
        assert lease.attributes["kvferry.how"] == "done"
        assert handover.attributes["kvferry.outcome"] == "loaded"
        assert lease.attributes["kvferry.lease"] == handover.attributes["kvferry.lease"]
        assert lease.attributes["kvferry.request_id"] == handover.attributes["kvferry.remote_request_id"]
        (load,), (reading,) = spans["kvferry.load"], spans["kvferry.load.reading"]
        assert (load.parent, reading.parent) == (handover.span, load.span)
