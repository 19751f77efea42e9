"""Servers: ready, not ready with the end of the log, and stopped with all their children."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from scripts.accuracy.devices import free_ports
from scripts.accuracy.processes import Server, ServerFailed

_SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def server(program: str, log: Path, port: int = 0) -> Server:
    command = [sys.executable, "-c", program, str(port)]
    return Server("toy", command, f"http://127.0.0.1:{port}", log, {"TOY": "1"})


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def test_a_server_is_awaited_and_stopped_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "toy.log"
    with server(_SERVES, log, free_ports(1)[0]) as toy:
        toy.wait_ready(30, path="/")
        child = int(re.findall(r"(?m)^child (\d+)$", log.read_text())[0])
        assert exists(child)
    assert not toy.alive
    deadline_s = time.monotonic() + 10
    while exists(child) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not exists(child)
    assert log.read_text().startswith("# TOY=1\n# ")


def test_a_server_that_ends_early_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    with (
        server(
            "print('no such model: x'); raise SystemExit(3)", tmp_path / "toy.log"
        ) as toy,
        pytest.raises(
            ServerFailed,
            match=r"(?s)toy ended with exit status 3 .*toy\.log.*no such model: x",
        ),
    ):
        toy.wait_ready(30)
