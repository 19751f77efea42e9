"""Every implementation of the relayout that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.relayout.runners import (
    Interpreter,
    Runner,
    interpreter,
    on_cuda,
    reference,
)

IMPLEMENTATIONS = ("reference", "interpreter", "cuda")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """Triton under its interpreter."""
    pytest.importorskip(
        "triton",
        reason="Triton is not installed: the kernel was not run, not even interpreted",
    )
    with interpreter() as running:
        yield running


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request: pytest.FixtureRequest) -> Runner:
    """One implementation after the other."""
    if request.param == "reference":
        return reference
    if request.param == "interpreter":
        found: Interpreter = request.getfixturevalue("interpreted")
        return found
    if not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE: the compiled kernel was not run on this machine")
    return on_cuda
