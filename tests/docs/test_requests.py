"""`curl …` on the pages, against servers of this machine that have kvferry's counters and the paths of vLLM's."""

from __future__ import annotations

import http.server
import importlib.util
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvferry.connector.metrics.tables import COUNTERS
from scripts.doc_commands import checked_by
from tests.docs.shell import Shell, succeeded

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
_HERE = "tests/docs/test_requests.py::"


@contextmanager
def server(paths: dict[tuple[str, str], bytes]) -> Iterator[tuple[str, list[str]]]:
    """Answers (method, path); gives its address, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            body = paths.get((self.command, self.path.partition("?")[0]))
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, name="documented-requests")
        thread.start()
        try:
            yield f"127.0.0.1:{serving.server_port}", asked
        finally:
            serving.shutdown()
            thread.join()


def exposition() -> bytes:
    """All counters as `/metrics` has them when an engine has just started."""
    registry = CollectorRegistry()
    for spec in COUNTERS.values():
        labels = ["engine", *([spec.label] if spec.label else [])]
        counter = Counter(f"vllm:{spec.exported}", spec.doc, labels, registry=registry)
        for value in spec.values or ("",):
            counter.labels("0", *([value] if spec.label else []))
    return bytes(generate_latest(registry))


def test_metrics_are_asked_for(tmp_path: Path) -> None:
    (command,) = checked_by(f"{_HERE}test_metrics_are_asked_for")
    with server({("GET", "/metrics"): exposition()}) as (address, _):
        printed = succeeded(Shell.within(tmp_path).run(command.text.replace("decode-0:8000", address)))
    lines = printed.splitlines()
    assert all(line.startswith("vllm:kvferry_") for line in lines)
    assert 'vllm:kvferry_loads_total{engine="0"} 0.0' in lines


def routes() -> set[tuple[str, str]]:
    """Method and path of everything that vLLM's API server has in its routers."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / "entrypoints").rglob("*.py")
    found = {each for file in files for each in re.findall(r'@router\.(get|post)\("(/\w+)"', file.read_text())}
    return {(method.upper(), path) for method, path in found}


def test_an_engine_is_asked_by_its_own_routes(tmp_path: Path) -> None:
    typed = [command.text for command in checked_by(f"{_HERE}test_an_engine_is_asked_by_its_own_routes")]
    shell = Shell.within(tmp_path)
    with server(dict.fromkeys(routes(), b"{}")) as (address, asked):
        for text in typed:
            succeeded(shell.run(text.replace("prefill-0:8000", address).replace("curl ", "curl --fail ")))
    assert asked == ["POST /pause", "POST /reset_prefix_cache?reset_external=true", "POST /resume"]
