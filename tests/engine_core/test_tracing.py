"""The recorded events of requests, exact and in order, by the scheduler and by the worker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connector.tracing.worker_events import load_event
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.params import read_params
from kvferry.scheduler.requests import KEEPS_BLOCKS
from kvferry.trace.events import (
    AnyEvent,
    ChunkSpan,
    DecodeArrived,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillStep,
    ProcessRole,
    ProcessStarted,
    Recomputed,
    TracedLease,
)
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.peers.peer import PeerKey
from tests.engine_core import streamed
from tests.harness.core.scheduler import tokens

pytestmark = pytest.mark.slow

PROMPT = tokens(100)
COUNT = 3
LOADED = [
    "DecodeArrived tokens=100",
    "LoadOrdered first_token=0 stop_token=100",
    "LoadReported good=True",
]


_DECODER = msgspec.json.Decoder(AnyEvent)


def events_of(
    folder: Path, node: Any, part: ProcessRole = ProcessRole.SCHEDULER
) -> list[Any]:
    """The events of a node that is closed, in the order of its files; all places of its workers together."""
    engine_id = node.engine.config.kv_transfer_config.engine_id
    found: list[Any] = []
    for path in sorted(folder.iterdir()):
        started, *events = (
            _DECODER.decode(line) for line in path.read_bytes().splitlines()
        )
        assert isinstance(started, ProcessStarted)
        if (started.engine_id, started.part) == (engine_id, part):
            found += events
    return found


def events_about(events: list[Any], request: str) -> list[str]:
    """A request's events in short: `LoadReported good=True`, without times and leases."""
    return [_short(event) for event in events if event.request == request]


def _short(event: Any) -> str:
    shown = ("tokens", "how", "reason", "first_token", "stop_token", "good")
    reported = [
        f" {name}={getattr(event, name)}"
        for name in shown
        if getattr(event, name, "") != ""
    ]
    return type(event).__name__ + "".join(reported)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def extra(folder: Path) -> dict[str, Any]:
    return {"trace_dir": str(folder)}


def lease_of(params: dict[str, Any]) -> TracedLease:
    source: Any = read_params(params)
    return TracedLease(boot=source.kvferry.boot, epoch=source.kvferry.lease_epoch)


def decode(node: Any, name: str, prompt: list[int], params: Any) -> None:
    node.engine.add(name, prompt, params, max_tokens=COUNT)
    node.answer(name)


@pytest.mark.parametrize(
    "shape",
    [{}, {"tp": 2, "overlap": True}],
    ids=["one worker", "two workers, overlapping"],
)
def test_a_handover_is_recorded_by_both_schedulers_and_by_every_worker_of_the_consumer(
    make: Any, folder: Path, extra: dict[str, Any], shape: dict[str, Any]
) -> None:
    producer, consumer = (
        make("kv_producer", extra=extra, **shape),
        make("kv_consumer", extra=extra, **shape),
    )
    params = producer.prefill("p", PROMPT)
    decode(consumer, "d", PROMPT, params)
    producer.until(lambda: producer.engine.is_whole)
    producer.close()
    consumer.close()

    prefill = events_of(folder, producer)
    assert events_about(prefill, "p") == [
        "PrefillArrived tokens=100",
        "PrefillScheduled",
        "ParamsGiven tokens=100",
        "LeaseOver how=done",
    ]
    assert {event.lease for event in prefill[1:]} == {lease_of(params)}
    handover = events_of(folder, consumer)
    assert events_about(handover, "d") == [*LOADED, "DecodeScheduled", "Finished"]
    arrived, ordered, reported = handover[:3]
    assert isinstance(arrived, DecodeArrived)
    assert (arrived.lease, arrived.remote_request) == (lease_of(params), "p")
    assert arrived.producer == producer.engine.config.kv_transfer_config.engine_id
    assert [event.at_ns for event in handover] == sorted(
        event.at_ns for event in handover
    )
    assert arrived.at_ns < prefill[-1].at_ns

    loads = events_of(folder, consumer, ProcessRole.WORKER)
    assert len(loads) == len(consumer.workers)
    for load in loads:
        assert isinstance(load, LoadEnded)
        assert isinstance(ordered, LoadOrdered)
        assert isinstance(reported, LoadReported)
        assert (load.request, load.producer, load.reason) == ("d", arrived.producer, "")
        assert [one.stage for one in load.stages] == [stage.value for stage in Stage]
        times = [
            ordered.at_ns,
            *(x for one in load.stages for x in (one.begun_ns, one.ended_ns)),
            reported.at_ns,
        ]
        assert times == sorted(times), "a worker's clock is the scheduler's"
        assert load.at_ns == load.stages[-1].ended_ns
        assert load.bytes == 7 * producer.engine.block_bytes
        assert load.descriptors > 0
    assert events_of(folder, producer, ProcessRole.WORKER) == []


def test_a_prompt_that_came_again_says_why_it_is_computed_and_of_which_lease(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer", extra=extra)
    params = producer.prefill("p", PROMPT)
    decode(consumer, "d1", PROMPT, params)
    consumer.engine.scheduler.reset_prefix_cache()
    decode(consumer, "d2", PROMPT, params)
    decode(consumer, "d3", PROMPT, {"do_remote_prefill": True, "remote_engine_id": 7})
    consumer.close()
    events = events_of(folder, consumer)
    assert events_about(events, "d2") == [
        "Recomputed reason=lease_over",
        "DecodeScheduled",
        "Finished",
    ]
    assert events_about(events, "d3") == [
        "Recomputed reason=foreign_params",
        "DecodeScheduled",
        "Finished",
    ]
    leases = {
        event.request: event.lease for event in events if isinstance(event, Recomputed)
    }
    assert leases == {"d2": lease_of(params), "d3": None}


def test_a_load_that_failed_says_where(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    producer, consumer = (
        make("kv_producer"),
        make("kv_consumer", extra={**extra, "handshake_timeout_s": 0.3}),
    )
    params = producer.prefill("p", PROMPT)
    producer.close()
    decode(consumer, "d", PROMPT, params)
    consumer.close()
    events = events_of(folder, consumer)
    assert events_about(events, "d") == [
        *LOADED[:2],
        "LoadReported good=False",
        "Recomputed reason=load_failed",
        "DecodeScheduled",
        "Finished",
    ]
    assert events[3].lease == lease_of(params)
    (load,) = events_of(folder, consumer, ProcessRole.WORKER)
    assert (load.reason, load.bytes) == ("handshake", 0)
    assert [one.stage for one in load.stages] == ["queued", "connecting"]


def test_leases_say_how_they_ended(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    producer = make(
        "kv_producer", overlap=True, extra={**extra, "kv_lease_duration": 0.1}
    )
    producer.prefill("unclaimed", PROMPT)
    producer.until(lambda: producer.engine.is_whole)
    producer.engine.add(
        "aborted", tokens(50, seed=3), {"do_remote_decode": True}, max_tokens=1
    )
    producer.step()
    producer.engine.abort("aborted")
    producer.until(lambda: producer.engine.is_whole)
    producer.close()
    events = events_of(folder, producer)
    begun = ["PrefillArrived tokens=100", "PrefillScheduled", "ParamsGiven tokens=100"]
    assert events_about(events, "unclaimed") == [*begun, "LeaseOver how=expired"]
    assert events_about(events, "aborted") == [
        "PrefillArrived tokens=50",
        "PrefillScheduled",
        "LeaseOver how=abandoned",
    ]


def test_a_request_that_is_aborted_before_its_load_or_in_it_has_an_end(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    producer, consumer = (
        make("kv_producer", extra=extra),
        make("kv_consumer", extra=extra),
    )
    other = tokens(100, seed=2)
    consumer.engine.add(
        "waiting", PROMPT, producer.prefill("p1", PROMPT), max_tokens=COUNT
    )
    consumer.engine.abort("waiting")
    consumer.engine.add(
        "loading", other, producer.prefill("p2", other), max_tokens=COUNT
    )
    first = consumer.engine.schedule()
    consumer.engine.abort("loading")
    consumer.engine.finish(first)
    consumer.workers[0].bind_connector_metadata(first.metadata)
    consumer.until(lambda: consumer.engine.is_whole)
    producer.until(lambda: producer.engine.is_whole)
    consumer.close()
    producer.close()
    events = events_of(folder, consumer)
    assert events_about(events, "waiting") == ["DecodeArrived tokens=100", "Finished"]
    *steps, reported = events_about(events, "loading")
    assert steps == [*LOADED[:2], "Finished"]
    assert reported in ("LoadReported good=False", "LoadReported good=True"), (
        "cancelled, unless it had just ended"
    )
    over = [
        event.how
        for event in events_of(folder, producer)
        if event.request == "p1" and hasattr(event, "how")
    ]
    assert over == ["release"]


def test_the_steps_of_a_prompt_that_is_read_meanwhile_are_recorded_under_its_first_epoch(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    producer = streamed.asked_for(make, extra=extra)
    producer.step()
    params = streamed.ticket(producer)
    lease = TracedLease(boot=params.kvferry.boot, epoch=params.kvferry.lease_epoch)
    producer.engine.preempt("p", drops_output=True)
    assert producer.answer("p").params is not None
    producer.engine.connector.scheduler_side.leases.release(
        streamed.lease_of(producer).name
    )
    producer.until(lambda: streamed.is_over(producer))
    producer.close()
    opened, *steps, given, over = events_of(folder, producer)[1:]
    assert {event.lease for event in (opened, *steps, given, over)} == {lease}
    assert all(isinstance(step, PrefillStep) for step in steps)
    assert [step.tokens for step in steps] == [128, 192, 200]
    assert producer.engine.counted("stream_restarts") == 1, (
        "the answer's params name another epoch"
    )
    assert steps[-1].tokens == len(streamed.PROMPT)
    assert [given.at_ns, over.at_ns] == sorted([given.at_ns, over.at_ns])


def test_a_prompt_that_was_read_before_its_request_ended_has_one_lease_in_all_events(
    make: Any, folder: Path, extra: dict[str, Any]
) -> None:
    """Also when it was computed twice: its params have the epoch that is READY, traces the lease's first one."""
    producer = streamed.asked_for(make, extra=extra, overlap=True)
    producer.step()
    producer.engine.preempt("p", drops_output=True)
    lease = streamed.lease_of(producer)
    while lease.state not in KEEPS_BLOCKS:
        producer.step()
    producer.engine.preempt("p", drops_output=True)
    producer.engine.connector.scheduler_side.leases.acknowledge(0, ["p"])
    params = producer.answer("p").params
    assert params is not None
    assert params["kvferry"]["lease_epoch"] != lease.origin.epoch
    producer.close()
    events = [
        event
        for event in events_of(folder, producer)
        if isinstance(event, (ParamsGiven, LeaseOver))
    ]
    assert [event.lease.epoch for event in events] == [lease.origin.epoch] * 2


def test_a_load_that_follows_a_prefill_says_what_it_read_when() -> None:
    source = PeerKey("host", 1, "engine", "0" * 32)
    chunks = tuple((number, 1.0 + number, 1.5 + number) for number in range(1, 70))
    load = LoadRecord(
        request_id="r",
        source=source,
        ordered_s=1.0,
        planned_bytes=9,
        early_bytes=7,
        restarts=2,
        chunks=chunks,
    )
    event = load_event(load, wall_offset_ns=5)
    assert event.chunks[0] == ChunkSpan(
        stop_token=1, begun_ns=2 * 10**9 + 5, ended_ns=25 * 10**8 + 5
    )
    assert (event.early_bytes, event.restarts) == (7, 2)
    assert _DECODER.decode(msgspec.json.encode(event)) == event, (
        "as many as a reader takes"
    )


def test_an_engine_that_traces_nothing_has_no_thread_for_it_and_makes_no_event(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("an event was made")

    scheduler = ("PrefillArrived", "PrefillScheduled", "PrefillStep", "ParamsGiven")
    for name in (
        *scheduler,
        "DecodeArrived",
        "LoadOrdered",
        "LoadReported",
        "Finished",
    ):
        monkeypatch.setattr(f"kvferry.connector.tracing.scheduler_events.{name}", made)
    monkeypatch.setattr("kvferry.connector.tracing.worker_events.LoadEnded", made)
    producer, consumer = make("kv_producer"), make("kv_consumer")
    decode(consumer, "d", PROMPT, producer.prefill("p", PROMPT))
    assert consumer.engine.counted("loads") == 1
    assert not {thread.name for thread in threading.enumerate()} & {
        "kvferry-trace",
        "kvferry-spans",
    }


def test_a_folder_that_cannot_be_used_stops_the_start(
    make: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"trace_dir is .*/missing/traces"):
        make("kv_producer", extra={"trace_dir": str(tmp_path / "missing" / "traces")})
