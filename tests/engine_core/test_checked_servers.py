"""The check that real servers of the tests make in every step (tests/vllm/checked.py) finds what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector import FerryConnector
from tests.harness.core.scheduler import tokens
from tests.vllm.checked import broken_of, check_every_step


def test_a_step_whose_counts_contradict_each_other_is_in_the_log(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for hook in ("build_connector_meta", "update_connector_output", "get_finished"):
        monkeypatch.setattr(
            FerryConnector, hook, getattr(FerryConnector, hook)
        )  # undone at the end
    log = tmp_path / "server.log"
    written = logging.FileHandler(log)
    monkeypatch.setattr(logging.getLogger("kvferry"), "handlers", [written])
    check_every_step()
    engine = make_engine("kv_producer")
    engine.add("p", tokens(40), {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    assert broken_of(log) == []
    references = engine.connector.scheduler_side.leases.block_references
    lease = references.held.pop("p")
    engine.step()
    assert broken_of(log)
    references.held["p"] = lease
    written.close()
