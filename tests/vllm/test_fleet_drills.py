"""Engines are killed under load and come back: what clients of vllm-router see meanwhile, and what survivors hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.accuracy.engines import Router
from scripts.accuracy.model import default_cache_dir
from tests.draws import usual_cases
from tests.promises import promise
from tests.vllm.fleet import Fleet, check_idle, outage, prefill, running
from tests.vllm.forked_server import ForkedServer
from tests.vllm.load import (
    TIMEOUT_S,
    Kind,
    Load,
    Outage,
    Outcome,
    Tokens,
    ask,
    judge,
    prompt_of,
)
from tests.vllm.small_models import small_model

FEW = 5
LONG = 7000
"""Tokens of a stream that must not end before an engine is killed: a busy machine may let its client wait for
seconds."""
RECOMPUTE, FAIL = 0, 1
NAMES = ("recompute", "fail")
POLICIES = pytest.mark.parametrize("policy", [RECOMPUTE, FAIL], ids=NAMES)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = small_model("small-llama-4", default_cache_dir())
    with running(str(model), tmp_path_factory.mktemp("fleet")) as started:
        yield started


@contextmanager
def router(
    producers: Sequence[ForkedServer], consumers: Sequence[ForkedServer], logs: Path
) -> Iterator[Router]:
    """A router that asks dead engines too: one with a circuit breaker would only wait longer until it comes back."""
    more = ("--disable-circuit-breaker", "--decode-policy", "random")
    prefill_urls, decode_urls = (
        [server.base_url for server in servers] for servers in (producers, consumers)
    )
    with Router(prefill_urls, decode_urls, logs, TIMEOUT_S, more) as started:
        started.wait_ready(60.0)
        yield started


def report(
    drill: str,
    counted: object,
    outages: Sequence[Outage],
    ready_s: float,
    after: Sequence[Outcome],
) -> None:
    """A line for those who read the figures."""
    dead_s = ", ".join(f"{each.ended_s - each.began_s:.1f}" for each in outages)
    right_s = min(outcome.ended_s for outcome in after) - ready_s
    print(
        f"{drill}: {counted}; dead for {dead_s} s; right again {right_s:.2f} s after it was ready"
    )


@dataclass(frozen=True)
class LongStream:
    """A stream under way.

    Attributes:
        outcome: of its client.
    """

    outcome: Future[Outcome]
    _is_to_leave: threading.Event

    def leave(self) -> Outcome:
        """What its client has when it leaves it with the next token: all others would take both cores for minutes,
        once by the stream and once by the engine that says what is right."""
        self._is_to_leave.set()
        return self.outcome.result()


@contextmanager
def long_stream(base_url: str, prompt: Tokens, **more: Any) -> Iterator[LongStream]:
    """A stream that has begun, and has not nearly ended when the body begins."""
    began, leave = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as client:
        outcome = client.submit(
            ask,
            base_url,
            prompt,
            stream=True,
            tokens=LONG,
            began=began,
            leave=leave,
            **more,
        )
        assert began.wait(TIMEOUT_S), outcome.result()
        try:
            yield LongStream(outcome, leave)
        finally:
            leave.set()


@promise(3)
def test_a_killed_decoder_comes_back_to_the_same_producer(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Of one policy: none of its loads fails. A decoder with the other one is killed below, with a producer."""
    producer = fleet.producers[RECOMPUTE]
    consumer = fleet.consumers[RECOMPUTE]
    name = "decoder"
    outages: list[Outage] = []
    with (
        router([producer], [consumer], tmp_path) as front,
        Load(name, front.base_url) as load,
    ):
        load.wait_for(FEW, Kind.ANSWERED)
        with (
            long_stream(front.base_url, prompt_of(f"{name}, long", 0)) as long,
            outage(outages, consumer) as killed_s,
        ):
            broken = long.outcome.result()
            plain = ask(producer.base_url, prompt_of(f"{name}, plain", 0))
            load.wait_for(FEW, Kind.REFUSED, killed_s)
        ready_s = time.monotonic()
        after = load.wait_for(2 * FEW, Kind.ANSWERED, ready_s)
    outcomes = [*load.outcomes, broken, plain]
    counted = judge(outcomes, outages, fleet.right(outcomes))
    report(name, counted, outages, ready_s, after)
    assert (broken.kind, plain.kind) == (Kind.BROKEN, Kind.ANSWERED)
    assert 0 < len(broken.tokens) < LONG
    fresh = consumer.metrics()
    assert fresh.total("vllm:kvferry_loads_total") >= len(after)
    assert fresh.total("vllm:kvferry_failed_loads_total") == 0
    assert fresh.total("vllm:kvferry_local_recomputes_total") == 0
    check_idle(name, [producer], [consumer])


@promise(4)
@usual_cases(1)
@POLICIES
def test_a_killed_producer_comes_back_to_the_same_decoder(
    fleet: Fleet, policy: int, tmp_path: Path
) -> None:
    """Prompts handed over before are computed, or end with an error, both while no producer runs and after its restart
    with another boot; prompts read before are not affected."""
    producer, consumer = fleet.producers[policy], fleet.consumers[policy]
    name = f"producer, {NAMES[policy]}"
    outages: list[Outage] = []
    prompts = [prompt_of(f"{name}, handed over", number) for number in range(4)]
    long_prompt = prompt_of(f"{name}, long", 0)
    before = consumer.metrics()
    with (
        router([producer], [consumer], tmp_path) as front,
        Load(name, front.base_url) as load,
    ):
        load.wait_for(FEW, Kind.ANSWERED)
        params = [prefill(producer, prompt) for prompt in prompts]
        long_params = prefill(producer, long_prompt)
        with (
            long_stream(
                consumer.base_url, long_prompt, kv_transfer_params=long_params
            ) as long,
            outage(outages, producer) as killed_s,
        ):
            handed_over = [
                ask(consumer.base_url, prompt, kv_transfer_params=given, stream=stream)
                for prompt, given, stream in zip(
                    prompts, params, (False, True, False), strict=False
                )
            ]
            plain = [ask(consumer.base_url, prompt) for prompt in prompts]
            load.wait_for(FEW, Kind.REFUSED, killed_s)
            read_before = long.leave()
        ready_s = time.monotonic()
        handed_over.append(
            ask(consumer.base_url, prompts[3], kv_transfer_params=params[3])
        )
        after = load.wait_for(2 * FEW, Kind.ANSWERED, ready_s)
    of_load = load.outcomes
    right = fleet.right([*of_load, *plain, *handed_over, read_before])
    report(name, judge(of_load, outages, right), outages, ready_s, after)
    judge([*plain, read_before], [], right)
    assert read_before.ended_s > killed_s
    moved = consumer.metrics() - before
    print(moved.by_label("vllm:kvferry_failed_loads_total", "reason"))
    ended = [outcome.kind for outcome in handed_over]
    if policy == RECOMPUTE:
        judge(handed_over, [], right)
        assert moved.total(
            "vllm:kvferry_local_recomputes_total", reason="load_failed"
        ) >= len(handed_over)
    else:
        assert ended == [Kind.REFUSED, Kind.BROKEN, Kind.REFUSED, Kind.REFUSED], (
            handed_over
        )
        assert not any(outcome.tokens for outcome in handed_over)
        assert moved.total("vllm:kvferry_failed_requests_total") >= len(handed_over)
    assert moved.total("vllm:kvferry_failed_loads_total") >= len(handed_over)
    check_idle(name, [producer], [consumer])


@promise(4)
def test_two_and_two_lose_one_of_each_and_get_them_back(
    fleet: Fleet, tmp_path: Path
) -> None:
    name = "two and two"
    outages: list[Outage] = []
    servers = (*fleet.producers, *fleet.consumers)
    with (
        router(fleet.producers, fleet.consumers, tmp_path) as front,
        Load(name, front.base_url) as load,
    ):
        load.wait_for(2 * FEW, Kind.ANSWERED)
        with outage(outages, fleet.producers[0], fleet.consumers[1]) as killed_s:
            load.wait_for(FEW, Kind.REFUSED, killed_s)
            load.wait_for(FEW, Kind.ANSWERED, killed_s)
        ready_s = time.monotonic()
        before = [server.metrics() for server in servers]
        after = load.wait_for(5 * FEW, Kind.ANSWERED, ready_s)
    outcomes = load.outcomes
    counted = judge(outcomes, outages, fleet.right(outcomes))
    report(name, counted, outages, ready_s, after)
    moved = [
        server.metrics() - earlier
        for server, earlier in zip(servers, before, strict=True)
    ]
    assert all(
        each.total("vllm:kvferry_leases_released_total", how="done") > 0
        for each in moved[:2]
    )
    assert all(each.total("vllm:kvferry_loads_total") > 0 for each in moved[2:])
    check_idle(name, fleet.producers, fleet.consumers)
