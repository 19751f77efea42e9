"""Whole engines with a secret file in their environment: prompts are handed over between those who share a secret."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvferry.protocol.errors import InvalidSecretFile
from kvferry.protocol.side_channel.secrets import VARIABLE, Secret
from tests.harness.core.scheduler import Engine, tokens
from tests.protocol.secret_files import NEW, OLD, OTHER, listing, write

PROMPT = tokens(40)


@contextmanager
def secret_file(folder: Path, *secrets: Secret) -> Iterator[None]:
    """The environment of an engine that is given a file with these; without any of them, of one without a file."""
    if not secrets:
        yield
        return
    path = write(folder / "secrets", listing(*secrets))
    with mock.patch.dict(os.environ, {VARIABLE: path}):
        yield


@pytest.mark.parametrize(
    ("theirs", "ours", "is_loaded"),
    [([OLD, NEW], [NEW, OLD], True), ([OLD], [], False), ([], [OLD], False), ([OLD, NEW], [NEW, OTHER], False)],
    ids=["rotation", "missing", "superfluous", "another"],
)
def test_a_prompt_is_read_if_the_secrets_go_together_and_computed_if_they_do_not(
    make: Any, tmp_path: Path, theirs: list[Secret], ours: list[Secret], is_loaded: bool
) -> None:
    with secret_file(tmp_path, *theirs):
        producer = make("kv_producer")
    with secret_file(tmp_path, *ours):
        consumer = make("kv_consumer", extra={"handshake_timeout_s": 10})
    consumer.decode("d", PROMPT, producer.prefill("p", PROMPT))
    assert consumer.engine.counted("local_recomputes", "load_failed") == (not is_loaded)
    assert consumer.engine.counted("failed_loads", "refused") == (not is_loaded)
    assert bool(consumer.engine.counted("planned_bytes")) == is_loaded
    if is_loaded:
        producer.until(lambda: producer.engine.is_whole)
        assert producer.engine.counted("leases_released", "done") == 1
    else:
        producer.until(lambda: producer.engine.counted("side_channel_refusals") >= 1)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_file_that_others_can_read_stops_the_start(tmp_path: Path, role: str) -> None:
    path = write(tmp_path / "open", listing(OLD), 0o644)
    with mock.patch.dict(os.environ, {VARIABLE: path}), pytest.raises(InvalidSecretFile, match="mode 0644"):
        Engine("FerryConnector", module="kvferry.connector", role=role)


@pytest.mark.parametrize(
    ("host", "secrets", "warns"),
    [("0.0.0.0", [], True), ("127.0.0.1", [], False), ("0.0.0.0", [OLD], False)],
    ids=["everywhere", "loopback", "with a secret"],
)
def test_an_open_listener_logs_a_warning_and_how_to_change_it(
    tmp_path: Path,
    host: str,
    secrets: list[Secret],
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    with secret_file(tmp_path, *secrets), caplog.at_level(logging.INFO, logger="kvferry"):
        engine = Engine("FerryConnector", module="kvferry.connector", role="kv_producer")
        engine.close()
    assert ("answers every client" in caplog.text) == warns
    assert (VARIABLE in caplog.text) == warns
    for secret in secrets:
        assert secret.fingerprint in caplog.text
        assert secret.material.hex()[:8] not in caplog.text
