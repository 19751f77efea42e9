"""SIGTERM to a server that holds a lease."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.accuracy.engines import Transfer
from tests.processes import has_processes
from tests.vllm.conftest import START_S
from tests.vllm.fleet import prefill
from tests.vllm.forked_server import ForkedServer, small_server
from tests.vllm.load import Kind, ask, prompt_of
from tests.waiting import wait_until

DRAIN_S = 200
ENDS_S = 60.0
LEASE_S = 3600.0
"""So that only a consumer ends it."""


def server(name: str, core: str, role: str, logs: Path, **extra: Any) -> ForkedServer:
    """A server that drains before it ends."""
    transfer = Transfer(role, extra_config=extra)
    return small_server(
        name, core, transfer, logs, args=("--shutdown-timeout", str(DRAIN_S))
    )


def terminate(engine: ForkedServer) -> int:
    """SIGTERM to the API server alone, as a supervisor sends it. Returns its group."""
    os.kill(engine.pid, signal.SIGTERM)
    return engine.pid


def check_gone(engine: ForkedServer, group: int) -> None:
    """It ends by itself, with status 0, and leaves no process behind."""
    assert engine.process is not None
    engine.process.join(ENDS_S)
    assert engine.process.exitcode == 0, engine.failure(
        f"ended with {engine.process.exitcode}"
    )
    wait_until(lambda: not has_processes(group), "no process is left", timeout_s=10.0)
    assert "force killing" not in engine.log_path.read_text(), engine.failure(
        "was killed"
    )


def test_a_server_that_drains_is_read_to_the_end_and_exits_after_the_last_reader(
    logs: Path,
) -> None:
    with ExitStack() as stack:
        producer = stack.enter_context(
            server("drains", "0", "kv_producer", logs, kv_lease_duration=LEASE_S)
        )
        consumer = stack.enter_context(
            server("reads", "1", "kv_consumer", logs, handshake_timeout_s=15)
        )
        for engine in (producer, consumer):
            engine.wait_ready(START_S)
        prompt = prompt_of("drain", 0)
        right = ask(producer.base_url, prompt)
        params = prefill(producer, prompt)
        group = terminate(producer)
        answer = ask(consumer.base_url, prompt, kv_transfer_params=params)
        assert (answer.kind, answer.tokens) == (right.kind, right.tokens), answer.text
        assert right.kind is Kind.ANSWERED
        metrics = consumer.metrics()
        assert metrics.total("vllm:kvferry_loads_total") == 1
        assert metrics.total("vllm:kvferry_local_recomputes_total") == 0
        check_gone(producer, group)
        check_gone(consumer, terminate(consumer))
