"""Engines of vLLM's CUDA wheel on the emulated GPU. Nothing is collected where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forkserver

IS_EMULATED = "tests.gpu_emulation.emulation.start" in sys.modules
collect_ignore_glob = [] if IS_EMULATED else ["test_*.py"]

if IS_EMULATED:
    forkserver.PRELOAD[:] = ["tests.gpu_emulation.preload"]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines log."""
    return tmp_path_factory.mktemp("engines")
