"""An engine without vLLM whose start fails at any point: no thread, file or socket of it is left."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from kvferry.protocol.errors import InvalidConfig
from kvferry.worker.fabric.errors import FabricUnavailable
from tests.harness.rig import Rig
from tests.open_files import open_files

BUG = KeyError("a bug")


@pytest.mark.parametrize(
    ("part", "failed"),
    [
        ("worker.worker.WorkerMemory.register", FabricUnavailable("register", "full")),
        ("worker.worker.FirstContact", RuntimeError("no thread")),
        ("worker.transfer_thread.TailZeroing", BUG),
        ("worker.worker.FerryWorker.add_siblings", BUG),
        ("connector.standalone.SideChannelClient", RuntimeError("no thread")),
        ("connector.standalone.SideChannelListener", InvalidConfig("port", 1, "2")),
    ],
)
def test_an_engine_whose_start_fails_leaves_nothing_open(
    rig: Rig, part: str, failed: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine("P")  # what is opened once a process
    files = open_files()
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(f"kvferry.{part}", mock.Mock(side_effect=failed))
        with pytest.raises(type(failed)):
            rig.engine("Q")
    assert open_files() <= files
    assert set(threading.enumerate()) <= threads
