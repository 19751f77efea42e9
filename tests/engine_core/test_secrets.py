"""Whole engines with a secret file in their environment: prompts are handed over between those who share a secret."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvferry.link import host_names
from kvferry.link.secrets import VARIABLE, Secret
from kvferry.protocol.errors import InvalidConfig, InvalidSecretFile
from kvferry.protocol.hosts import HOST_VARIABLE
from kvferry.worker.fabric.nixl import NixlFabric
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.link.secret_files import NEW, OLD, OTHER, listing, write

PROMPT = tokens(40)


def own_address() -> str:
    """An address of this machine that others may reach; empty if there is none."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("203.0.113.7", 9))
        return str(sender.getsockname()[0])
    return ""


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
    [
        ([OLD, NEW], [NEW, OLD], True),
        ([OLD], [], False),
        ([], [OLD], False),
        ([OLD, NEW], [NEW, OTHER], False),
    ],
    ids=["rotation", "missing", "superfluous", "another"],
)
def test_a_prompt_is_read_if_the_secrets_go_together_and_computed_if_they_do_not(
    make: Any,
    tmp_path: Path,
    theirs: list[Secret],
    ours: list[Secret],
    is_loaded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[bytes] = []
    add_peer = NixlFabric.add_peer

    def record(self: NixlFabric, metadata: bytes) -> Any:
        parsed.append(metadata)
        return add_peer(self, metadata)

    monkeypatch.setattr(NixlFabric, "add_peer", record)
    with secret_file(tmp_path, *theirs):
        producer = make("kv_producer")
    with secret_file(tmp_path, *ours):
        consumer = make("kv_consumer", extra={"handshake_timeout_s": 10})
    consumer.decode("d", PROMPT, producer.prefill("p", PROMPT))
    assert consumer.engine.counted("local_recomputes", "load_failed") == (not is_loaded)
    assert consumer.engine.counted("failed_loads", "refused") == (not is_loaded)
    assert bool(consumer.engine.counted("planned_bytes")) == is_loaded
    assert bool(parsed) == is_loaded, (
        "NIXL parses metadata in native code, of peers with the secret alone"
    )
    if is_loaded:
        producer.until(lambda: producer.engine.is_whole)
        assert producer.engine.counted("leases_released", "done") == 1
    else:
        producer.until(lambda: producer.engine.counted("side_channel_refusals") >= 1)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_file_that_others_can_read_stops_the_start(tmp_path: Path, role: str) -> None:
    path = write(tmp_path / "open", listing(OLD), 0o644)
    with (
        mock.patch.dict(os.environ, {VARIABLE: path}),
        pytest.raises(InvalidSecretFile, match="mode 0644"),
    ):
        SchedulerEngine("FerryConnector", module="kvferry.connector", role=role)


@pytest.mark.parametrize(
    ("host", "secrets", "warns"),
    [
        (own_address(), [], True),
        ("127.0.0.1", [], False),
        (own_address(), [OLD], False),
    ],
    ids=["reachable", "loopback", "with a secret"],
)
@pytest.mark.skipif(
    own_address() == "", reason="this machine has no address but loopback"
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
    with (
        secret_file(tmp_path, *secrets),
        caplog.at_level(logging.INFO, logger="kvferry"),
    ):
        engine = SchedulerEngine(
            "FerryConnector", module="kvferry.connector", role="kv_producer"
        )
        engine.close()
    assert ("answers every client" in caplog.text) == warns
    assert (VARIABLE in caplog.text) == warns
    assert (HOST_VARIABLE in caplog.text) == (host == "127.0.0.1"), (
        "which only decoders of this host reach"
    )
    for secret in secrets:
        assert secret.fingerprint in caplog.text
        assert secret.material.hex()[:8] not in caplog.text


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "[::]",
        "*",
        "0",
        "fe80::1%eth0",
        "tcp://10.1.2.3",
        "10.1.2.3:5600",
    ],
)
def test_a_producer_that_decoders_could_not_be_sent_to_does_not_start_and_a_consumer_does(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host travels in params: decoders would look for it on their own host."""
    monkeypatch.setenv(HOST_VARIABLE, host)
    for role in ("kv_producer", "kv_both"):
        with pytest.raises(
            InvalidConfig, match=f"{HOST_VARIABLE} is .* that decoders reach"
        ):
            SchedulerEngine("FerryConnector", module="kvferry.connector", role=role)
    SchedulerEngine(
        "FerryConnector", module="kvferry.connector", role="kv_consumer"
    ).close()


def test_a_producer_whose_name_is_a_loopback_address_names_the_variable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's file of hosts has it for a machine's own name."""
    monkeypatch.setenv(HOST_VARIABLE, "node-1")
    monkeypatch.setattr(host_names, "look_up", {"node-1": "127.0.1.1"}.__getitem__)
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        SchedulerEngine(
            "FerryConnector", module="kvferry.connector", role="kv_producer"
        ).close()
    assert "node-1:" in caplog.text
    assert "(127.0.1.1) is only reached from this host" in caplog.text
    assert HOST_VARIABLE in caplog.text
