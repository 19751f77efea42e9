"""kvferry's lines in vLLM's log: once, marked, at vLLM's level."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvferry.connector.logs import join_vllm_log

pytestmark = pytest.mark.slow


class Kept(logging.Handler):
    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Log:
    """The loggers of a process of its own: the root's, vLLM's with a handler and without propagation, and ours."""

    def __init__(self) -> None:
        root = logging.RootLogger(logging.WARNING)
        self.manager = logging.Manager(root)
        self.root_handler, self.handler = Kept(), Kept()
        root.addHandler(self.root_handler)
        self.vllm = self.manager.getLogger("vllm")
        self.vllm.addHandler(self.handler)
        self.vllm.setLevel(logging.INFO)
        self.vllm.propagate = False
        self.kvferry = self.manager.getLogger("kvferry")
        self.ours = self.manager.getLogger("kvferry.worker.test")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(
        "kvferry.connector.logs.logging",
        SimpleNamespace(getLogger=log.manager.getLogger),
    )
    return log


def test_a_line_reaches_vllms_handler_once_with_the_mark_however_often_the_logs_are_joined(
    log: Log,
) -> None:
    for _ in range(3):
        join_vllm_log()
    log.ours.warning("req=%s slot=%d", "a", 7)
    assert log.handler.lines == ["WARNING kvferry.worker.test kvferry: req=a slot=7"]
    assert not log.root_handler.lines, "and the root logger does not repeat it"


def test_a_log_with_handlers_of_its_own_is_left_alone(log: Log) -> None:
    own = Kept()
    log.kvferry.addHandler(own)
    join_vllm_log()
    log.ours.warning("mine")
    assert (len(own.lines), len(log.handler.lines), len(log.root_handler.lines)) == (
        1,
        0,
        1,
    )


SCRIPT = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from kvferry.connector.logs import join_vllm_log
join_vllm_log(); join_vllm_log()
logging.getLogger("kvferry.worker.x").warning("req=%s is lost", "abc")
"""


def test_in_a_real_process_the_line_looks_like_vllms_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if "req=abc" in line
    ]
    assert len(lines) == 1
    assert " WARNING " in f" {lines[0]}"
    assert lines[0].endswith("kvferry: req=abc is lost")
