"""What vllm-router's paths say while engines fail: why the probes of deploy/ and of its image ask `/readiness`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class _Engine(ThreadingHTTPServer):
    """Answers health checks; `status`: with what."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Health)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Engine)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words: object) -> None:
        """Silent."""


@pytest.fixture
def engines() -> Iterator[list[_Engine]]:
    """Two producers and a consumer."""
    found = [_Engine() for _ in range(3)]
    yield found
    for engine in found:
        engine.shutdown()
        engine.server_close()


def test_one_engine_of_each_pool_is_enough_to_be_ready(
    engines: list[_Engine], tmp_path: Path
) -> None:
    first, second, decode = engines
    port, metrics = free_port(), free_port()
    words = [
        "--vllm-pd-disaggregation",
        "--kv-connector=nixl",
        "--host=127.0.0.1",
        "--health-check-interval-secs=1",
    ]
    words += [f"--port={port}", f"--prometheus-port={metrics}", f"--decode={decode.url}"]
    words += [f"--prefill={engine.url}" for engine in (first, second)]
    with (tmp_path / "log").open("wb") as log:
        router = subprocess.Popen(
            [sys.executable, "-m", "vllm_router.launch_router", *words], stdout=log, stderr=log
        )

    def answers() -> dict[str, int]:
        return {
            path: status(f"http://127.0.0.1:{port}{path}")
            for path in ("/health", "/readiness", "/liveness")
        }

    def wait_for(health: int, readiness: int, what: str) -> None:
        wanted = {"/health": health, "/readiness": readiness, "/liveness": 200}
        wait_until(lambda: answers() == wanted, what, 60)

    try:
        wait_for(200, 200, "all engines are healthy")
        first.status = 503
        wait_for(503, 200, "one of two producers is not")
        decode.status = 503
        wait_for(503, 503, "the only consumer is not")
        first.status = decode.status = 200
        wait_for(200, 200, "all engines are healthy again")
    finally:
        router.terminate()
        router.wait(timeout=30)


def status(url: str) -> int:
    """The status of an answer; 0 without one."""
    try:
        with urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return 0
