"""Where the rig's caches are: `pytest tests/rig --device cuda`, with the folder named, has them on GPU 0."""

from __future__ import annotations

import pytest
import torch

from kvferry.worker.device import Device
from tests.rig.memory import WorkerMemory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where the caches of tests/rig are",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda":
        WorkerMemory.device = Device(torch.device("cuda", 0))
        WorkerMemory.device.use()
