"""Servers: ready, not ready with the end of the log, and stopped with all their children."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from scripts.accuracy.devices import free_ports
from scripts.accuracy.processes import Server, ServerFailed, tail

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


def test_a_server_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        server("print('no such model: x'); raise SystemExit(3)", tmp_path / "toy.log") as toy,
        pytest.raises(
            ServerFailed, match=r"(?s)toy ended with exit status 3 .*toy\.log.*no such model: x"
        ),
    ):
        toy.wait_ready(30)


def test_a_server_that_hangs_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = "import time; print('still loading', flush=True); time.sleep(600)"
    with server(program, tmp_path / "toy.log", free_ports(1)[0]) as toy:
        while "still loading" not in toy.log_path.read_text().split("\n", 2)[-1]:
            time.sleep(0.01)
        with pytest.raises(ServerFailed, match=r"(?s)toy was not ready after 0 s.*still loading"):
            toy.wait_ready(0.3)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    step = "(APIServer) INFO [loggers.py:1] Engine 000: Iteration(7): 1 context requests\n"
    path.write_text("".join(f"line {number}\n{step}" for number in range(10000)))
    assert tail(path, 2) == "line 9998\nline 9999"
    assert "No such file" in tail(tmp_path / "none")
    (tmp_path / "empty").touch()
    assert tail(tmp_path / "empty") == "(the log is empty)"
