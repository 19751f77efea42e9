"""The fabrics under test: the fake, NIXL over shared memory, NIXL over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.worker.fabric.harness import (
    Harness,
    MemoryHarness,
    NixlHarness,
    NixlTcpHarness,
)
from tests.worker.fabric.scenes import AgentPair


@pytest.fixture(
    params=[MemoryHarness, NixlHarness, NixlTcpHarness],
    ids=["memory", "nixl", "nixl-tcp"],
)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with contextlib.closing(request.param()) as made:
        yield made


@pytest.fixture(params=[MemoryHarness, NixlTcpHarness], ids=["memory", "nixl-tcp"])
def waiting_harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Transports that need the peer's help for a read; over CMA the kernel reads from a frozen process as well."""
    with contextlib.closing(request.param()) as made:
        yield made


@pytest.fixture
def pair(harness: Harness) -> AgentPair:
    return AgentPair(harness)
