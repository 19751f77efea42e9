"""The port to a device: that of the stand-in, and a real one if there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.worker.device.ports import Gpu, Port, StandIn


@pytest.fixture(params=["stand-in", "cuda"])
def port(request: pytest.FixtureRequest) -> Port:
    """One after the other."""
    if request.param == "stand-in":
        return StandIn()
    if not torch.cuda.is_available():
        pytest.skip(
            "NO CUDA DEVICE: the stand-in was not compared with a real device on this machine"
        )
    return Gpu()
