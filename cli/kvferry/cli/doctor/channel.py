"""The side channel's address and ports, the secret, and the ports of NIXL's telemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.protocol.side_channel.secrets import MAKE_ONE, VARIABLE

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 5600
TELEMETRY_PORT = 9090
"""NIXL's default of NIXL_TELEMETRY_PROMETHEUS_PORT."""

_YES = ("y", "yes", "on", "true", "enable", "1")


@dataclass(frozen=True, slots=True)
class Channel:
    """The side channel's addresses of engines on this machine.

    Attributes:
        host: the value of `HOST_VARIABLE`, or the default.
        default: whether the variable is not set.
        address: the host's address, None if it has none.
        loopback: whether only this machine can reach it.
        ports: one per data-parallel rank → the errno's name of a real attempt to bind it, `""` if it worked.
        wrong_port: the configured port if it is not a valid one, else empty.
    """

    host: str
    default: bool
    address: str | None
    loopback: bool
    ports: Mapping[int, str]
    wrong_port: str = ""


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """path: of the file, None if none is configured. fingerprints: of its secrets. wrong: why it cannot be used."""

    path: str | None
    fingerprints: tuple[str, ...] = ()
    wrong: str = ""


def judge_channel(channel: Channel) -> Iterator[Finding]:
    """Findings about the host, then about every port."""
    check = "side channel"
    shown = f"{HOST_VARIABLE}{' is not set:' if channel.default else '='}{' ' if channel.default else ''}{channel.host}"
    if channel.address is None:
        yield broken(check, f"{shown}: no such host", f"export {HOST_VARIABLE}=<this machine's address>")
        return
    if channel.address in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
        found = f"{shown}: params would send decoders to their own machine"
        yield broken(check, found, f"export {HOST_VARIABLE}=<one of: hostname -I>")
        return
    if "EADDRNOTAVAIL" in channel.ports.values():
        found = f"{shown} ({channel.address}) is no address of this machine: a producer cannot listen"
        yield broken(check, found, f"export {HOST_VARIABLE}=<one of: hostname -I>")
        return
    if channel.loopback:
        do = f"expected on one host; else export {HOST_VARIABLE}=<an address that decoders reach>"
        yield look(check, f"{shown}: no other machine can reach a producer here", do)
    else:
        yield ok(check, f"{shown} ({channel.address})")
    if channel.wrong_port:
        yield broken(
            "side channel ports",
            f"{PORT_VARIABLE}={channel.wrong_port} is no port",
            f"export {PORT_VARIABLE}={DEFAULT_PORT}",
        )
    yield from _ports(channel)


def _ports(channel: Channel) -> Iterator[Finding]:
    check = "side channel ports"
    free = [port for port, refused in channel.ports.items() if not refused]
    if free:
        yield ok(check, f"free: {', '.join(map(str, free))}")
    for rank, (port, refused) in enumerate(channel.ports.items()):
        if refused == "EADDRINUSE":
            do = f"expected while an engine runs; else: ss -ltnp 'sport = :{port}', or another {PORT_VARIABLE}"
            yield look(check, f"{port} (data-parallel rank {rank}) is in use", do)
        elif refused:
            do = f"export {PORT_VARIABLE}=<a port from 1024 to 65535, so that every rank's is, too>"
            yield broken(check, f"{port} (data-parallel rank {rank}) cannot be bound: {refused}", do)


def judge_secret(secret: SecretFacts) -> Finding:
    """The file of the side channel's secrets; its content is never shown."""
    check = "secret"
    if secret.wrong:
        return broken(check, secret.wrong, f"see docs/operations.md; a new one: (umask 077; {MAKE_ONE} > FILE)")
    if secret.path is None:
        do = f"(umask 077; {MAKE_ONE} > FILE); export {VARIABLE}=FILE, the same for all engines"
        return look(check, f"{VARIABLE} is not set: any host that reaches the side channel can read the caches", do)
    return ok(check, f"{secret.path}, fingerprints {', '.join(secret.fingerprints)}; compare them between hosts")


def telemetry_port(environ: Mapping[str, str]) -> int | None:
    """The port of NIXL's Prometheus exporter; None if it is off or the port is not a number."""
    if environ.get("NIXL_TELEMETRY_ENABLE", "").lower() not in _YES:
        return None
    if environ.get("NIXL_TELEMETRY_EXPORTER", "").lower() != "prometheus":
        return None
    port = environ.get("NIXL_TELEMETRY_PROMETHEUS_PORT", str(TELEMETRY_PORT))
    return int(port) if port.isdecimal() and 0 < int(port) < 65536 else None


def judge_telemetry(port: int | None, refused: str, gpus: int) -> Finding:
    """`refused`: the errno's name of a real attempt to bind the port, `""` if it worked."""
    check = "NIXL telemetry"
    if port is None:
        return ok(check, "no port of NIXL's own; its figures are in the engine's /metrics")
    if refused:
        do = "another NIXL_TELEMETRY_PROMETHEUS_PORT; or unset NIXL_TELEMETRY_ENABLE and read the engine's /metrics"
        return look(
            check, f"port {port} cannot be bound ({refused}): an engine started here has no telemetry, silently", do
        )
    found = f"port {port}, which one process can have"
    if gpus > 1:
        do = "unset NIXL_TELEMETRY_ENABLE and read the engine's /metrics, or give every worker a port of its own"
        return look(check, f"{found}: of an engine's {gpus} workers the others have no telemetry, silently", do)
    return ok(check, found)
