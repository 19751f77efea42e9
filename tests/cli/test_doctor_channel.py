"""Side channel, secret and telemetry: findings from invented facts, and gathering with real sockets and files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvferry.cli.doctor.channel import (
    HOST_VARIABLE,
    PORT_VARIABLE,
    Channel,
    SecretFacts,
    judge_channel,
    judge_secret,
    judge_telemetry,
    telemetry_port,
)
from kvferry.cli.doctor.findings import Mark
from kvferry.cli.doctor.gather_software import gather_channel, gather_secret
from kvferry.protocol.side_channel.secrets import VARIABLE
from tests.protocol.secret_files import NEW, OLD, listing, write

LOCAL = Channel("10.0.0.7", False, "10.0.0.7", False, {5600: ""})


def channel(**changes: object) -> dict[str, list[Mark]]:
    """Marks by check."""
    facts = {name: getattr(LOCAL, name) for name in Channel.__slots__}
    found: dict[str, list[Mark]] = {}
    for finding in judge_channel(Channel(**{**facts, **changes})):
        assert finding.do or finding.mark is Mark.OK
        found.setdefault(finding.check, []).append(finding.mark)
    return found


def test_an_address_that_others_reach_with_free_ports_is_good() -> None:
    assert channel() == {"side channel": [Mark.OK], "side channel ports": [Mark.OK]}


def test_a_loopback_address_is_worth_a_look_since_it_is_the_default() -> None:
    found = channel(host="localhost", default=True, address="127.0.0.1", loopback=True)
    assert found == {"side channel": [Mark.LOOK], "side channel ports": [Mark.OK]}


def test_an_unknown_host_or_one_of_another_machine_is_broken() -> None:
    assert channel(address=None, ports={}) == {"side channel": [Mark.BROKEN]}
    assert channel(ports={5600: "EADDRNOTAVAIL"}) == {"side channel": [Mark.BROKEN]}


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_the_wildcard_address_cannot_be_advertised(address: str) -> None:
    """A listener can bind it, but decoders that get it in params would ask their own machine."""
    assert channel(host=address, address=address) == {"side channel": [Mark.BROKEN]}


def test_every_ranks_port_has_its_own_finding() -> None:
    found = list(judge_channel(Channel("h", False, "10.0.0.7", False, {1023: "EACCES", 1024: "", 1025: "EADDRINUSE"})))
    reported = {(one.mark, one.found) for one in found if one.check == "side channel ports"}
    assert reported == {
        (Mark.OK, "free: 1024"),
        (Mark.BROKEN, "1023 (data-parallel rank 0) cannot be bound: EACCES"),
        (Mark.LOOK, "1025 (data-parallel rank 2) is in use"),
    }


def test_an_invalid_port_is_broken() -> None:
    assert channel(ports={}, wrong_port="http") == {"side channel": [Mark.OK], "side channel ports": [Mark.BROKEN]}


def test_ports_are_really_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        environ = {HOST_VARIABLE: "127.0.0.1", PORT_VARIABLE: str(port)}
        found = gather_channel(environ, 2)
        assert list(found.ports) == [port, port + 1]
        assert (found.ports[port], found.loopback, found.default) == ("EADDRINUSE", True, False)
    assert gather_channel(environ, 1).ports == {port: ""}


def test_an_address_of_another_machine_is_detected() -> None:
    found = gather_channel({HOST_VARIABLE: "192.0.2.1"}, 1)
    assert set(found.ports.values()) == {"EADDRNOTAVAIL"}


def test_ports_out_of_range_and_words_are_detected() -> None:
    assert gather_channel({PORT_VARIABLE: "65535"}, 2).ports[65536] == "no port from 1 to 65535"
    found = gather_channel({PORT_VARIABLE: "tcp://10.0.0.1:80"}, 2)
    assert (found.ports, found.wrong_port) == ({}, "tcp://10.0.0.1:80")


@pytest.mark.parametrize(
    ("secret", "mark"),
    [
        (SecretFacts(None), Mark.LOOK),
        (SecretFacts("/run/secrets", ("1b1f7714",)), Mark.OK),
        (SecretFacts("/run/secrets", wrong="a file of mode 0644"), Mark.BROKEN),
    ],
)
def test_a_secret_is_wanted_and_one_that_cannot_be_used_is_broken(secret: SecretFacts, mark: Mark) -> None:
    assert judge_secret(secret).mark is mark


def test_a_secret_file_is_read_as_an_engine_reads_it_and_never_shown(tmp_path: Path) -> None:
    good = gather_secret({VARIABLE: write(tmp_path / "good", listing(NEW, OLD))})
    assert good.fingerprints == (NEW.fingerprint, OLD.fingerprint)
    open_to_all = gather_secret({VARIABLE: write(tmp_path / "open", listing(NEW), 0o644)})
    assert "chmod" in open_to_all.wrong
    short = gather_secret({VARIABLE: write(tmp_path / "short", b"abcd\n")})
    assert short.wrong
    assert gather_secret({}) == SecretFacts(None)
    for facts in (good, open_to_all, short):
        said = f"{judge_secret(facts)}"
        assert NEW.material.hex()[:8] not in said
        assert "abcd" not in said


PROMETHEUS = {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, None),
        (PROMETHEUS, 9090),
        ({**PROMETHEUS, "NIXL_TELEMETRY_PROMETHEUS_PORT": "9200"}, 9200),
        ({**PROMETHEUS, "NIXL_TELEMETRY_PROMETHEUS_PORT": "here"}, None),
        ({**PROMETHEUS, "NIXL_TELEMETRY_ENABLE": "n"}, None),
        ({"NIXL_TELEMETRY_ENABLE": "y"}, None),
    ],
)
def test_the_port_of_nixls_exporter_is_the_one_that_is_set(environ: dict[str, str], port: int | None) -> None:
    assert telemetry_port(environ) == port


@pytest.mark.parametrize(
    ("port", "refused", "gpus", "mark"),
    [
        (None, "", 8, Mark.OK),
        (9090, "", 1, Mark.OK),
        (9090, "", 8, Mark.LOOK),
        (9090, "EADDRINUSE", 1, Mark.LOOK),
    ],
)
def test_a_port_that_several_workers_share_leaves_all_but_one_without_telemetry(
    port: int | None, refused: str, gpus: int, mark: Mark
) -> None:
    assert judge_telemetry(port, refused, gpus).mark is mark
