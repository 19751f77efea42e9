"""Errors of this connector, or of its use of vLLM's internals, do not end an engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.harness.core.scheduler import tokens


@pytest.fixture
def producer(make_engine: Any) -> Any:
    return make_engine(extra={"debug_check_integrity": True})


def held(producer: Any, name: str) -> bool:
    """Whether a prompt is prefilled and held for another engine."""
    producer.add(name, tokens(40, seed=ord(name[0])), {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    return producer.answers[name].params is not None


def test_where_free_blocks_cannot_be_counted_leases_are_given_all_the_same(
    producer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = producer.connector.scheduler_side

    def renamed(_: object) -> None:
        raise AttributeError("no such thing in this vLLM")

    monkeypatch.setattr(side.eviction, "_demand", renamed)
    with caplog.at_level(logging.ERROR, "kvferry"):
        assert held(producer, "first")
        assert held(producer, "second")
    assert [record.getMessage() for record in caplog.records] == [
        "lease eviction disabled: free blocks could not be counted"
    ]


def test_sums_that_cannot_be_made_are_counted_in_every_step_and_logged_once(
    producer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed() -> None:
        raise AttributeError("no such thing in this vLLM")

    monkeypatch.setattr(producer.connector.scheduler_side.leases, "check_integrity", renamed)
    with caplog.at_level(logging.ERROR, "kvferry"):
        assert held(producer, "first")
    assert producer.counted("integrity_errors") > 1
    (reported,) = caplog.records
    assert "integrity check of the scheduler side failed" in reported.getMessage()
    assert reported.exc_info, "an unexpected error is shown with its traceback"
