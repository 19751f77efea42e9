"""Tests of this folder drive vLLM's real scheduler in process: no server, no model weights, no workers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.scheduler.consumer.pull_estimate import PullEstimate
from tests.needs_vllm import LEFT_OUT, import_quietly
from tests.ports import free_port

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

collect_ignore_glob = LEFT_OUT


def pytest_configure(config: pytest.Config) -> None:
    import_quietly(config, "vllm.v1.core.sched.scheduler")


@pytest.fixture(scope="module", autouse=True)
def _process_groups() -> Iterator[None]:
    """vLLM's process groups, which nodes start, end with the module."""
    yield
    importlib.import_module("tests.harness.core.node").stop_parallel_state()


@pytest.fixture
def sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is so slow, on any machine, that the engine would take a step by itself."""
    monkeypatch.setattr("kvferry.connector.scheduler_side.steps.MAX_IDLE_S", 3600.0)


@pytest.fixture
def is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model computes a prompt sooner than an answer comes: requests wait as a large model's do."""
    monkeypatch.setattr(PullEstimate, "wait_s", lambda *_: 3600.0)


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes nodes: `make(role, **config)`. They are closed at the end of the test, with an integrity check."""
    node_type = importlib.import_module("tests.harness.core.node").Node
    with contextlib.ExitStack() as stack:

        def build(role: str, **config: Any) -> Any:
            node = node_type(role, **config)
            stack.callback(node.close)
            return node

        yield build


@pytest.fixture
def make_both(make: Any) -> Any:
    """Makes nodes that offer turns: `make_both(**config)`."""
    turns = importlib.import_module("tests.engine_core.conversation").TURNS

    def build(
        *, role: str = "kv_both", extra: dict[str, Any] | None = None, **config: Any
    ) -> Any:
        return make(
            role, extra={**turns, **(extra or {})}, **{"num_blocks": 80, **config}
        )

    return build


@pytest.fixture
def begin(make_both: Any) -> Any:
    """Begins a conversation: `prefiller, decoder, talk = begin(prefiller, decoder, **both)`, the configurations of
    either node and of both. The first turn is over, unless `first` is False."""
    module = importlib.import_module("tests.engine_core.conversation")

    def build(
        prefiller: Any = None, decoder: Any = None, *, first: bool = True, **both: Any
    ) -> Any:
        nodes = [make_both(**both, **(own or {})) for own in (prefiller, decoder)]
        talk = module.Conversation(*nodes)
        if first:
            talk.say(module.FIRST)
        return *nodes, talk

    return build


@pytest.fixture
def make_engine() -> Iterator[Any]:
    """Makes schedulers whose workers' reports the test chooses: `make_engine(role, **config)`, with kvferry's connector
    if no other is named. They are closed at the end of the test, with an integrity check."""
    node = importlib.import_module("tests.harness.core.node")
    check_scheduler_side = importlib.import_module(
        "tests.harness.core.integrity"
    ).check_scheduler_side
    with contextlib.ExitStack() as stack:

        def build(
            role: str = "kv_producer",
            *,
            connector: str = "FerryConnector",
            module: str | None = "kvferry.connector",
            lease_s: float = 30.0,
            **config: Any,
        ) -> Any:
            if module == "kvferry.connector":
                config["extra"] = {
                    "kv_lease_duration": lease_s,
                    **config.get("extra", {}),
                }
            with node.side_channel(free_port()):
                engine = node.SchedulerEngine(
                    connector, module=module, role=role, **config
                )
            stack.callback(engine.close)
            if module == "kvferry.connector":
                stack.callback(check_scheduler_side, engine.connector.scheduler_side)
            return engine

        yield build


@pytest.fixture
def eavesdropper() -> Iterator[Any]:
    """A side channel without an engine that records the released slots."""
    made = importlib.import_module("tests.engine_core.offers").Eavesdropper()
    yield made
    made.close()


@pytest.fixture
def make_slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes producers with slow routers: `make_slow(**keys)`. Their integrity is checked in every step."""
    slow_type = importlib.import_module("tests.engine_core.slow_router").Slow
    with contextlib.ExitStack() as stack:

        def build(**extra: Any) -> Any:
            slow = slow_type(monkeypatch, **extra)
            stack.callback(slow.close)
            return slow

        yield build
