"""Lines of the log that may be repeated: one an interval, and the number of the others."""

from __future__ import annotations

import logging
import time

import pytest

from kvferry.protocol.rate_limited_log import RateLimitedLog


def test_one_line_an_interval_is_logged_and_the_next_one_says_how_many_were_omitted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log = RateLimitedLog(logging.getLogger("kvferry.test"), 5.0)
    for count in range(3):
        log.warning("dropped %d", count)
    now_s += 4.9
    log.warning("dropped %d", 3)
    now_s += 0.1
    log.warning("dropped %d", 4)
    now_s += 5.0
    log.warning("dropped %d", 5)
    assert caplog.messages == [
        "dropped 0",
        "dropped 4 (3 similar lines omitted)",
        "dropped 5",
    ]


def test_an_exception_is_logged_with_its_traceback_and_the_place_of_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedLog(logging.getLogger("kvferry.test"))
    try:
        raise KeyError("a bug")
    except KeyError:
        log.exception("the thread goes on")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert record.filename == "test_rate_limited_log.py"


def test_an_error_that_is_handled_no_more_is_logged_with_its_own_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedLog(logging.getLogger("kvferry.test"))
    log.exception("it has failed: %d", 1, error=KeyError("a bug"))
    (record,) = caplog.records
    assert record.getMessage() == "it has failed: 1"
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
