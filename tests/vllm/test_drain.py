"""SIGTERM to a server that holds a lease."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.small_models import default_cache_dir, small_model
from tests.vllm.conftest import START_S
from tests.vllm.fleet import prefill
from tests.vllm.forked_server import ForkedServer
from tests.vllm.load import Kind, ask, prompt_of

DRAIN_S = 200
ENDS_S = 60.0
LEASE_S = 3600.0
"""So that only a consumer ends it."""


def server(name: str, core: str, role: str, logs: Path, **extra: Any) -> ForkedServer:
    arguments = ("--skip-tokenizer-init", "--num-gpu-blocks-override", "64", "--shutdown-timeout", str(DRAIN_S))
    spec = EngineSpec(
        name,
        str(small_model("small-llama-4", default_cache_dir())),
        devices=(core,),
        max_model_len=1024,
        transfer=Transfer(role, extra_config=extra),
        extra_args=arguments,
    )
    return ForkedServer(spec, logs)


def terminate(engine: ForkedServer) -> int:
    """SIGTERM to the API server alone, as a supervisor sends it. Returns its group."""
    assert engine._process is not None
    assert engine._process.pid is not None
    os.kill(engine._process.pid, signal.SIGTERM)
    return engine._process.pid


def check_gone(engine: ForkedServer, group: int) -> None:
    """It ends by itself, with status 0, and leaves no process behind."""
    assert engine._process is not None
    engine._process.join(ENDS_S)
    assert engine._process.exitcode == 0, engine.failure(f"ended with {engine._process.exitcode}")
    deadline_s = time.monotonic() + 10.0
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(group, 0)
            time.sleep(0.05)
        raise AssertionError("processes are left")
    assert "force killing" not in engine.log_path.read_text(), engine.failure("was killed")


def test_a_server_that_drains_is_read_to_the_end_and_exits_after_the_last_reader(logs: Path) -> None:
    with ExitStack() as stack:
        producer = stack.enter_context(server("drains", "0", "kv_producer", logs, kv_lease_duration=LEASE_S))
        consumer = stack.enter_context(server("reads", "1", "kv_consumer", logs, handshake_timeout_s=15))
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
