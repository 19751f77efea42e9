"""All checks in their order, each with its `gather_…` and its judging function."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.cli.doctor import channel, devices, host, limits, transfer, ucx, versions
from kvferry.cli.doctor.devices import gather_devices
from kvferry.cli.doctor.findings import Finding, Unknown, gathered, judged
from kvferry.cli.doctor.gather_software import gather_channel, gather_secret, gather_versions, try_port
from kvferry.cli.doctor.host import (
    gather_clock,
    gather_foreign_memory,
    gather_huge_pages,
    gather_limits,
    gather_processors,
    gather_shared_memory,
)
from kvferry.cli.doctor.loopback import run_loopback


def added_by_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a worker adds to its environment before it creates an agent."""
    from kvferry.worker.fabric.agent import ucx_defaults  # needs numpy, which may be missing

    return ucx_defaults(environ)


def examine(environ: Mapping[str, str], ranks: int, timeout_s: float) -> tuple[Finding, ...]:
    """Run all checks.

    Args:
        environ: of the engines that will run here.
        ranks: data-parallel ranks of an engine on this machine.
        timeout_s: for the loopback transfer.
    """
    found = gathered(gather_devices)
    machine = found if not isinstance(found, Unknown) else devices.Devices()
    gpus, ports = len(machine.gpus), len(machine.ports)
    added = gathered(lambda: added_by_workers(environ))
    locked = gathered(gather_limits)
    telemetry = channel.telemetry_port(environ)
    refused = gathered(lambda: "" if telemetry is None else try_port("0.0.0.0", telemetry))  # noqa: S104 - NIXL does
    loopback = gathered(lambda: run_loopback(environ, timeout_s))
    files = None if isinstance(loopback, Unknown) else loopback.files_per_peer
    return (
        *judged("versions", gathered(gather_versions), lambda fact: versions.judge_versions(fact, gpus)),
        *judged("GPUs and NICs", found, devices.judge_devices),
        *judged(ucx.CHECK, added, lambda fact: ucx.judge_ucx(environ, machine, fact)),
        *judged("locked memory", locked, lambda fact: limits.judge_locked_memory(fact, ports)),
        *judged("open files", locked, lambda fact: limits.judge_files(fact, files)),
        *judged("shared memory", gathered(gather_shared_memory), limits.judge_shared_memory),
        *judged(
            "processors", gathered(lambda: gather_processors(environ)), lambda fact: host.judge_processors(fact, gpus)
        ),
        *judged("huge pages", gathered(gather_huge_pages), lambda fact: host.judge_huge_pages(fact, gpus)),
        *judged("clock", gathered(gather_clock), host.judge_clock),
        *judged("reads between processes", gathered(gather_foreign_memory), host.judge_foreign_memory),
        *judged("side channel", gathered(lambda: gather_channel(environ, ranks)), channel.judge_channel),
        *judged("secret", gathered(lambda: gather_secret(environ)), channel.judge_secret),
        *judged("NIXL telemetry", refused, lambda fact: channel.judge_telemetry(telemetry, fact, gpus)),
        *judged("loopback transfer", loopback, lambda fact: transfer.judge_loopback(fact, gpus)),
    )
