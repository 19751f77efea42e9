"""Side channel, secret and telemetry, with real sockets and files."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.doctor import channel
from kvferry.cli.doctor.channel import PORT_VARIABLE, check_address, check_secret, check_telemetry
from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Mark
from kvferry.link.secrets import VARIABLE
from kvferry.protocol.hosts import HOST_VARIABLE
from tests.link.channel import free_port
from tests.link.secret_files import NEW, OLD, listing, write

HERE = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as listening:
        listening.bind((HERE, 0))
        listening.listen(1)
        yield listening.getsockname()[1]


def address(environ: dict[str, str], ranks: int = 1) -> list[tuple[Mark, str]]:
    """Marks and texts."""
    findings = list(check_address(Machine(environ, ranks)))
    assert all(one.do or one.mark is Mark.OK for one in findings)
    return [(one.mark, one.found) for one in findings]


@pytest.mark.parametrize(
    ("host", "mark", "said"),
    [
        (None, Mark.LOOK, "is not set: localhost: no other machine"),
        (HERE, Mark.LOOK, "no other machine"),
        ("no-such-host.invalid", Mark.BROKEN, "no such host"),
        ("192.0.2.1", Mark.BROKEN, "no address of this machine"),
        # A listener can bind them, but decoders that get them in params would ask their own machine.
        ("0.0.0.0", Mark.BROKEN, "whichever host reads it"),
        ("::", Mark.BROKEN, "whichever host reads it"),
        ("fe80::1%eth0", Mark.BROKEN, "neither an address nor a host name"),
        ("127.0.0.1:5600", Mark.BROKEN, "neither an address nor a host name"),
    ],
)
def test_the_address_must_be_one_of_this_machine_that_others_reach(
    host: str | None, mark: Mark, said: str
) -> None:
    environ = {PORT_VARIABLE: str(free_port()), **({HOST_VARIABLE: host} if host else {})}
    (found_mark, found), *ports = address(environ)
    assert (found_mark, said in found) == (mark, True), found
    assert [one for one, _ in ports] == ([Mark.OK] if mark is Mark.LOOK else [])


def test_an_address_that_others_reach_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "try_port", lambda address, port: "")
    assert address({HOST_VARIABLE: "192.0.2.1"}) == [
        (Mark.OK, f"{HOST_VARIABLE}=192.0.2.1 (192.0.2.1)"),
        (Mark.OK, "free: 5600"),
    ]


def test_every_ranks_port_has_its_own_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {1023: "EACCES", 1025: "EADDRINUSE"}
    monkeypatch.setattr(channel, "try_port", lambda address, port: refusals.get(port, ""))
    assert address({HOST_VARIABLE: "192.0.2.1", PORT_VARIABLE: "1023"}, 3)[1:] == [
        (Mark.OK, "free: 1024"),
        (Mark.BROKEN, "1023 (data-parallel rank 0) cannot be bound: EACCES"),
        (Mark.LOOK, "1025 (data-parallel rank 2) is in use"),
    ]


def test_ports_are_really_tried(taken: int) -> None:
    found = address({HOST_VARIABLE: HERE, PORT_VARIABLE: str(taken)})
    assert found[1:] == [(Mark.LOOK, f"{taken} (data-parallel rank 0) is in use")]
    free = str(free_port())
    assert address({HOST_VARIABLE: HERE, PORT_VARIABLE: free})[1:] == [(Mark.OK, f"free: {free}")]


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ("65535", "65536 (data-parallel rank 1) cannot be bound: no port"),
        ("tcp://a:80", "is no port"),
    ],
)
def test_ports_out_of_range_and_words_are_broken(port: str, said: str) -> None:
    mark, found = address({HOST_VARIABLE: HERE, PORT_VARIABLE: port}, 2)[-1]
    assert (mark, said in found) == (Mark.BROKEN, True), found


@pytest.mark.parametrize(
    ("content", "mode", "mark", "said"),
    [
        (listing(NEW, OLD), 0o600, Mark.OK, f"fingerprints {NEW.fingerprint}, {OLD.fingerprint}"),
        (listing(NEW), 0o644, Mark.BROKEN, "chmod"),
        (b"abcd\n", 0o600, Mark.BROKEN, "secret"),
    ],
    ids=["good", "open to all", "short"],
)
def test_a_secret_file_is_read_as_an_engine_reads_it_and_never_shown(
    content: bytes, mode: int, mark: Mark, said: str, tmp_path: Path
) -> None:
    (finding,) = check_secret(Machine({VARIABLE: write(tmp_path / "file", content, mode)}))
    assert (finding.mark, said in finding.found) == (mark, True), finding
    assert NEW.material.hex()[:8] not in str(finding)
    assert "abcd" not in str(finding)


def test_a_missing_secret_is_worth_a_look() -> None:
    (finding,) = check_secret(Machine())
    assert finding.mark is Mark.LOOK


PROMETHEUS = {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}


@pytest.mark.parametrize(
    ("environ", "gpus", "mark", "said"),
    [
        ({}, 8, Mark.OK, "no port"),
        ({**PROMETHEUS, "NIXL_TELEMETRY_PROMETHEUS_PORT": "here"}, 8, Mark.OK, "no port"),
        (PROMETHEUS, 1, Mark.OK, "port 9090, which"),
        (PROMETHEUS, 8, Mark.LOOK, "of an engine's 8 workers"),
    ],
)
def test_a_telemetry_port_that_several_workers_share_leaves_all_but_one_without(
    environ: dict[str, str], gpus: int, mark: Mark, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "try_port", lambda address, port: "")
    (finding,) = check_telemetry(Machine(environ, gpus=("GPU",) * gpus))
    assert (finding.mark, said in finding.found) == (mark, True), finding


def test_a_telemetry_port_in_use_is_worth_a_look(taken: int) -> None:
    (finding,) = check_telemetry(
        Machine({**PROMETHEUS, "NIXL_TELEMETRY_PROMETHEUS_PORT": str(taken)})
    )
    assert (finding.mark, "EADDRINUSE" in finding.found) == (Mark.LOOK, True)
