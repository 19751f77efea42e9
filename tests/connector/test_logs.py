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
    monkeypatch.setattr("kvferry.connector.logs.logging", SimpleNamespace(getLogger=log.manager.getLogger))
    return log


def test_a_line_reaches_vllms_handler_once_with_the_mark_however_often_the_logs_are_joined(log: Log) -> None:
    for _ in range(3):
        join_vllm_log()
    log.ours.warning("req=%s slot=%d", "a", 7)
    assert log.handler.lines == ["WARNING kvferry.worker.test kvferry: req=a slot=7"]
    assert not log.root_handler.lines, "and the root logger does not repeat it"


def test_lines_below_vllms_level_are_not_even_made(log: Log) -> None:
    join_vllm_log()
    assert not log.ours.isEnabledFor(logging.DEBUG)
    log.ours.debug("quiet")
    log.ours.info("event")
    assert [line.endswith("kvferry: event") for line in log.handler.lines] == [True]


def test_every_handler_of_vllm_gets_the_line_at_its_own_level(log: Log) -> None:
    errors, late = Kept(logging.ERROR), Kept()
    log.vllm.addHandler(errors)
    join_vllm_log()
    log.vllm.addHandler(late)
    log.ours.info("one")
    log.ours.error("two")
    assert [len(handler.lines) for handler in (log.handler, errors, late)] == [2, 1, 2]


def test_other_handlers_get_the_line_without_the_mark_and_a_percent_sign_is_harmless(log: Log) -> None:
    join_vllm_log()
    own = Kept()
    log.kvferry.addHandler(own)
    log.ours.info("100% of it")
    assert own.lines == ["INFO kvferry.worker.test 100% of it"]
    assert log.handler.lines == ["INFO kvferry.worker.test kvferry: 100% of it"]


def test_an_exception_keeps_its_traceback(log: Log) -> None:
    join_vllm_log()
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.ours.exception("req=%s", "a")
    assert "kvferry: req=a\nTraceback" in log.handler.lines[0]
    assert "RuntimeError: boom" in log.handler.lines[0]


def test_a_log_with_handlers_of_its_own_is_left_alone(log: Log) -> None:
    own = Kept()
    log.kvferry.addHandler(own)
    join_vllm_log()
    log.ours.warning("mine")
    assert (len(own.lines), len(log.handler.lines), len(log.root_handler.lines)) == (1, 0, 1)


def test_without_handlers_of_vllm_the_line_goes_where_all_others_go(log: Log) -> None:
    log.vllm.handlers.clear()
    join_vllm_log()
    log.ours.warning("plain")
    assert log.root_handler.lines == ["WARNING kvferry.worker.test plain"]


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
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "req=abc" in line]
    assert len(lines) == 1
    assert " WARNING " in f" {lines[0]}"
    assert lines[0].endswith("kvferry: req=abc is lost")
