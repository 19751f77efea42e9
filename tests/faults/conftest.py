"""Engines in processes of their own; none of them outlives its test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.faults.process import Fleet, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that engines are forked from."""
    with contextlib.closing(Zygote()) as made:
        yield made


@pytest.fixture
def fleet(zygote: Zygote) -> Iterator[Fleet]:
    """The engines of one test."""
    with contextlib.closing(Fleet(zygote)) as made:
        yield made
