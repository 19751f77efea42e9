"""The cost of a real engine while it holds an unread lease, and the detection of the lease's end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import zmq

from kvferry.protocol.handshake import LeaseName, Release, encode
from tests.vllm.conftest import START_S
from tests.vllm.fleet import prefill
from tests.vllm.forked_server import ForkedServer
from tests.vllm.load import prompt_of
from tests.vllm.test_drain import LEASE_S, server
from tests.waiting import wait_until

MEASURED_S = 31.0
"""Two steps that an engine takes by itself are among them."""
MOST_CORES = 0.15
"""Of the API server, the engine core and the worker together."""
MOST_CORES_OF_A_WORKER = 0.03


def cpu_s(engine: ForkedServer) -> dict[str, float]:
    """Processor time so far of each process of a server."""
    first = psutil.Process(engine.pid)
    seen = {}
    for process in (first, *first.children(recursive=True)):
        times = process.cpu_times()
        seen[f"{process.pid} {process.name()}"] = times.user + times.system
    return seen


def test_an_engine_that_holds_a_lease_takes_little_of_a_core_and_soon_knows_that_it_was_given_back(logs: Path) -> None:
    with server("idles", "0", "kv_producer", logs, kv_lease_duration=LEASE_S) as engine:
        engine.wait_ready(START_S)
        params = prefill(engine, prompt_of("idle", 0))
        time.sleep(2.0)
        before, began_s = cpu_s(engine), time.monotonic()
        time.sleep(MEASURED_S)
        after, wall_s = cpu_s(engine), time.monotonic() - began_s
        cores = {name: (after[name] - before[name]) / wall_s for name in before}
        print({name: round(share, 3) for name, share in cores.items()}, "load", os.getloadavg())
        assert sum(cores.values()) < MOST_CORES
        (of_worker,) = [share for name, share in cores.items() if "Worker" in name]
        assert of_worker < MOST_CORES_OF_A_WORKER
        assert engine.metrics().total("vllm:kv_cache_usage_perc") > 0, "held blocks are in use"
        assert engine.metrics().total("vllm:num_requests_running") == 0
        ours = params["kvferry"]
        name = LeaseName(slot=ours["lease_slot"], epoch=ours["lease_epoch"])
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{params['remote_port']}")
            socket.send_multipart([b"", encode(Release(boot=ours["boot"], leases=(name,)))])
            wait_until(
                lambda: engine.metrics().total("vllm:kvferry_leases_released_total", how="release") == 1,
                "the lease's end is known without any request",
                timeout_s=60,
            )
        wait_until(lambda: engine.metrics().total("vllm:kv_cache_usage_perc") == 0, "its blocks are free", timeout_s=30)
        assert "cannot be woken" not in engine.log_path.read_text()
