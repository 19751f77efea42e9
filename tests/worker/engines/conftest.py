"""Rigs of engines; each test has its own, and no thread of kvferry outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.cuda import FakeCuda
from tests.fakes.cuda_memory import kernels
from tests.harness.rig import Rig, rig_of


@pytest.fixture(params=["memory", "nixl"])
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """On the fake fabric and on the real one."""
    with rig_of(request.param) as rig:
        yield rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """On the fake fabric, for faults that only a fake has on demand."""
    with rig_of("memory") as rig:
        yield rig


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """The second GPU of a host, on which the relayout's kernel runs in numpy."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with kernels():
        yield FakeCuda()
