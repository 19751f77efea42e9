"""Engines in processes of their own; none of them outlives its test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.harness.process import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """The engines of one test."""
    with contextlib.closing(Fleet()) as made:
        yield made
