"""The side channel's address and ports, the secret, and the port of NIXL's telemetry."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterator

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.link.host_names import listening_address
from kvferry.link.secrets import MAKE_ONE, VARIABLE, secrets_from_environment
from kvferry.protocol.errors import InvalidSecretFile
from kvferry.protocol.hosts import HOST_VARIABLE, read_host

PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 5600
# NIXL's default of NIXL_TELEMETRY_PROMETHEUS_PORT.
TELEMETRY_PORT = 9090

_YES = ("y", "yes", "on", "true", "enable", "1")


def check_address(machine: Machine) -> Iterator[Finding]:
    """The address on which vLLM would listen, then every rank's port, by an attempt to bind it."""
    host = machine.environ.get(HOST_VARIABLE, DEFAULT_HOST)
    setting = f"{HOST_VARIABLE}={host}"
    if HOST_VARIABLE not in machine.environ:
        setting = f"{HOST_VARIABLE} is not set: {host}"
    problem = ""
    address = ""
    try:
        read_host(host)
        address = listening_address(host)
        if try_port(address, 0) == "EADDRNOTAVAIL":
            problem = f"{setting} ({address}) is not an address of this machine: a producer cannot listen"
    except ValueError as why:
        problem = f"{setting} is {why}: a producer cannot start"
    except OSError as no_such_host:
        problem = f"{setting}: {no_such_host}"
    if problem:
        yield broken(problem, f"export {HOST_VARIABLE}=<one of: hostname -I>")
        return
    if ipaddress.ip_address(address).is_loopback:
        yield look(
            f"{setting}: no other machine can reach a producer here",
            f"expected on one host; else export {HOST_VARIABLE}=<an address that decoders reach>",
        )
    else:
        yield ok(f"{setting} ({address})")
    yield from _ports(machine, address)


def _ports(machine: Machine, address: str) -> Iterator[Finding]:
    """Every data-parallel rank's port."""
    check = "side channel ports"
    written = machine.environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    if not re.fullmatch(r"[0-9]{1,5}", written):
        do = f"export {PORT_VARIABLE}={DEFAULT_PORT}"
        yield broken(f"{PORT_VARIABLE}={written} is not a port", do, check)
        return
    free = []
    taken = []
    for rank in range(machine.ranks):
        port = int(written) + rank
        refusal = "not a port from 1 to 65535"
        if 0 < port < 65536:
            refusal = try_port(address, port)
        named = f"{port} (data-parallel rank {rank})"
        if not refusal:
            free.append(str(port))
        elif refusal == "EADDRINUSE":
            do = f"expected while an engine runs; else: ss -ltnp 'sport = :{port}', or another {PORT_VARIABLE}"
            taken.append(look(f"{named} is in use", do, check))
        else:
            do = f"export {PORT_VARIABLE}=<a port from 1024, with room for every rank up to 65535>"
            taken.append(broken(f"{named} cannot be bound: {refusal}", do, check))
    if free:
        yield ok(f"free: {', '.join(free)}", check)
    yield from taken


def try_port(address: str, port: int) -> str:
    """Bind the port (0: any) and release it; returns the errno's name, or `""`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        # As ZMQ does: a port with connections in TIME_WAIT counts as free.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((address, port))
            attempt.listen(1)
        except OSError as refused:
            return errno.errorcode.get(refused.errno or 0, str(refused))
    return ""


def check_secret(machine: Machine) -> Iterator[Finding]:
    """The file of the side channel's secrets, read as an engine reads it; its content is never shown."""
    path = machine.environ.get(VARIABLE)
    try:
        secrets = secrets_from_environment(machine.environ)
    except InvalidSecretFile as wrong:
        do = f"see docs/operations.md; a new one: (umask 077; {MAKE_ONE} > FILE)"
        yield broken(str(wrong), do)
        return
    if path is None:
        yield look(
            f"{VARIABLE} is not set: any host that reaches the side channel can read the caches; "
            "decoders read from this host alone, unless allowed_hosts lists others",
            f"(umask 077; {MAKE_ONE} > FILE); export {VARIABLE}=FILE, the same for all engines",
        )
        return
    fingerprints = ", ".join(secret.fingerprint for secret in secrets)
    yield ok(f"{path}, fingerprints {fingerprints}; compare them between hosts")


def check_telemetry(machine: Machine) -> Iterator[Finding]:
    """The port of NIXL's own Prometheus exporter, which only one process can have."""
    environ = machine.environ
    written = environ.get("NIXL_TELEMETRY_PROMETHEUS_PORT", str(TELEMETRY_PORT))
    is_enabled = environ.get("NIXL_TELEMETRY_ENABLE", "").lower() in _YES
    is_prometheus = environ.get("NIXL_TELEMETRY_EXPORTER", "").lower() == "prometheus"
    is_port = written.isdecimal() and 0 < int(written) < 65536
    if not (is_enabled and is_prometheus and is_port):
        yield ok(
            "NIXL opens no port of its own; its figures are in the engine's /metrics"
        )
        return
    refusal = try_port("0.0.0.0", int(written))  # noqa: S104 - NIXL does
    gpus = len(machine.gpus)
    if refusal:
        yield look(
            f"port {written} cannot be bound ({refusal}): an engine started here silently has no telemetry",
            "another NIXL_TELEMETRY_PROMETHEUS_PORT; or unset NIXL_TELEMETRY_ENABLE and read the engine's /metrics",
        )
    elif gpus > 1:
        # The second process with the port has no telemetry, and NIXL does not say so.
        yield look(
            f"port {written}, which only one process can bind: an engine's other {gpus - 1} workers silently have none",
            "unset NIXL_TELEMETRY_ENABLE and read the engine's /metrics, or give every worker a port of its own",
        )
    else:
        yield ok(f"port {written}, which only one process can bind")
