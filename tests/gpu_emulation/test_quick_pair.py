"""The part of the emulated tier that every run of the tests has, where its environment was built."""

from __future__ import annotations

import pytest

from tests.gpu_emulation import build
from tests.gpu_emulation.run import CASES, run

_TIMEOUT_S = 300.0
"""Half a minute alone; beside other tests it takes longer, and only a hang takes so long."""


def test_engines_of_vllms_cuda_wheel_hand_over_on_an_emulated_gpu() -> None:
    if not build.has_packages():
        pytest.skip(
            f"NO EMULATED GPU: `{build.COMMAND}` builds it (1.1 GB from PyPI, two minutes)"
        )
    build.build()  # stand-ins that have changed: seconds
    assert run([f"{CASES}/test_handovers.py::test_full_attention"], _TIMEOUT_S) == 0
