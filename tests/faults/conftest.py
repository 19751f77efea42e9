"""Engines in processes of their own; none of them outlives its test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvferry.link import limits
from kvferry.link.limits import Backoff
from tests.harness.process import Fleet


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that failed is asked again soon."""
    monkeypatch.setattr(limits, "AVOID", Backoff(0.005, 0.01))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """The engines of one test."""
    with contextlib.closing(Fleet()) as made:
        yield made
