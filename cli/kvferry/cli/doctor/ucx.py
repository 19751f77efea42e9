"""`UCX_*` variables that are known to cause hangs, leaks or slow transfers.

Variables that kvferry sets itself are judged as it would set them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.worker.fabric.ucx_settings import (
    FAILED_READ_GRACE_S,
    GPU_READS,
    NO,
    YES,
    ucx_defaults,
    uses_tcp,
)

_MESSAGES = re.compile(r"all|ib|tcp|srd|(rc|dc|ud)(_v|_x|_verbs|_mlx5)?")
_SHARED_MEMORY = re.compile(r"sm|shm|mm|posix|sysv|xpmem")
_CUDA = re.compile(r"all|cuda|cuda_copy|cuda_ipc|gdr_copy")
_LOUD = ("debug", "trace", "req", "data", "async", "func", "poll")
# With UCX's own 20 s a core was seen to spin after 85 minutes (worker/fabric/ucx_settings.py).
_SHORT_S = 60.0
# By the InfiniBand specification a NIC may take four times its timeout.
_HARDWARE_FACTOR = 4
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def check_ucx(machine: Machine) -> Iterator[Finding]:
    """All known problems; if there are none, the settings."""
    added = ucx_defaults(machine.environ, has_cuda=bool(machine.gpus))
    # As a worker's process will have it.
    environ = {**added, **machine.environ}
    problems = [
        *_transports(environ, machine),
        *_net_devices(environ, machine),
        *_error_handling(environ),
        *_retries(environ),
        *_others(environ, machine),
    ]
    yield from problems
    if not problems:
        own = _written(machine.environ) or "none set"
        yield ok(f"{own}; kvferry adds {_written(added) or 'none'}")


def _others(environ: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """Single variables."""
    reads = environ.get(GPU_READS, "y")
    if machine.gpus and reads.lower() not in YES:
        found = f"{GPU_READS}={reads}: reads between GPUs of this host may go through host memory and loopback TCP"
        yield look(found, f"unset {GPU_READS}: kvferry sets it to y")
    if machine.ports and environ.get("UCX_RCACHE_MAX_UNRELEASED", "inf") == "inf":
        found = "UCX_RCACHE_MAX_UNRELEASED has no bound: UCX's cache of registered memory was seen to leak"
        yield look(found, "export UCX_RCACHE_MAX_UNRELEASED=1024")
    level = environ.get("UCX_LOG_LEVEL", "warn")
    if level.lower().startswith(_LOUD):
        yield look(
            f"UCX_LOG_LEVEL={level} slows every transfer", "export UCX_LOG_LEVEL=warn"
        )


def _written(environ: Mapping[str, str]) -> str:
    settings = (f"{name}={value}" for name, value in sorted(environ.items()))
    return " ".join(setting for setting in settings if setting.startswith("UCX_"))


def _has_any(names: set[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names)


def _transports(environ: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """`UCX_TLS`: a transport for messages, and one for GPU memory."""
    value = environ.get("UCX_TLS", "all").strip()
    # `\rc` is rc exactly, `ud:aux` is ud for one purpose.
    entries = (
        entry.strip().partition(":")[0].removeprefix("\\") for entry in value.split(",")
    )
    names = {*entries} - {""}
    if value.startswith("^") or "all" in names:
        return
    setting = f"UCX_TLS={value}"
    has_messages = _has_any(names, _MESSAGES)
    if not has_messages and not _has_any(names, _SHARED_MEMORY):
        found = f"{setting} has no transport for messages: no agent can be made"
        yield broken(found, "unset UCX_TLS, or add rc (InfiniBand, RoCE) or tcp to it")
    elif not has_messages and environ.get("UCX_MM_ERROR_HANDLING", "").lower() in NO:
        found = f"{setting} with UCX_MM_ERROR_HANDLING=n: shared memory alone cannot make an agent then"
        yield broken(found, "unset UCX_MM_ERROR_HANDLING: kvferry sets it")
    elif not has_messages:
        found = f"{setting} reaches peers on this host only"
        yield look(found, "unset UCX_TLS, or add rc or tcp, for peers elsewhere")
    if machine.gpus and not _has_any(names, _CUDA):
        found = f"{setting} has no transport for GPU memory, on a machine with GPUs"
        yield broken(found, f"export {setting},cuda")
    if machine.gpus and "cuda_copy" in names and not {"cuda", "cuda_ipc"} & names:
        found = f"{setting} has no cuda_ipc: reads between GPUs of this host go through host memory"
        yield look(found, f"export {setting},cuda_ipc")


def _net_devices(environ: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """`UCX_NET_DEVICES`: devices that are there and up."""
    value = environ.get("UCX_NET_DEVICES", "all").strip()
    active = [port.name for port in machine.active_ports]
    do = f"export UCX_NET_DEVICES={','.join(active) or 'all'}"
    if value == "all":
        if 1 < len(active) < len(machine.ports):
            found = "UCX_NET_DEVICES is not set, and not every NIC port is up: transfers were seen to hang"
            yield look(found, do)
        return
    # Exclusions, ranges and patterns are left to UCX.
    if re.search(r"[\^\[\]*?]", value):
        return
    named = {name.strip() for name in value.split(",")} - {""}
    ports = {port.name for port in machine.ports}
    here = {*machine.interfaces, *ports}
    missing = ", ".join(sorted(named - here))
    if missing:
        devices = ", ".join(sorted(here)) or "none"
        found = (
            f"UCX_NET_DEVICES names {missing}, not on this machine, which has {devices}"
        )
        yield broken(found, f"{do}, or unset it")
    down = ", ".join(sorted(named & ports - {*active}))
    if down:
        yield broken(f"UCX_NET_DEVICES names {down}, which is down", do)


def _error_handling(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Messages through shared memory, where a peer's death is noticed by keepalives alone."""
    handling = environ.get("UCX_MM_ERROR_HANDLING", "n")
    if handling.lower() in NO:
        return
    if uses_tcp(environ):
        yield look(
            f"UCX_MM_ERROR_HANDLING={handling}: a process killed in mid-message can hang others of its host",
            "unset UCX_MM_ERROR_HANDLING: messages within the host then go over loopback TCP",
        )
    value = environ.get("UCX_KEEPALIVE_INTERVAL", "300s")
    interval_s = seconds(value)
    harm = ""
    if interval_s in (0.0, math.inf):
        harm = "over shared memory alone a read from a dead peer may never end"
    elif interval_s is not None and interval_s < _SHORT_S:
        harm = "with a short interval a frozen peer on this host makes a core spin"
    if harm:
        do = "unset UCX_KEEPALIVE_INTERVAL: kvferry sets it to 300s"
        yield look(f"UCX_KEEPALIVE_INTERVAL={value}: {harm}", do)


def _retries(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Retries by the NIC, in which a read that has failed may still write."""
    timeout_s = seconds(environ.get("UCX_RC_TIMEOUT", "1s"))
    retries = environ.get("UCX_RC_RETRY_COUNT", "7")
    if timeout_s is None or not retries.isdecimal():
        return
    longest_s = timeout_s * int(retries) * _HARDWARE_FACTOR
    if longest_s >= FAILED_READ_GRACE_S:
        found = f"UCX_RC_TIMEOUT × UCX_RC_RETRY_COUNT lets a failed read write for {longest_s:.0f} s"
        yield look(
            f"{found}, longer than failed_read_grace_s ({FAILED_READ_GRACE_S:g})",
            f"unset both, or set failed_read_grace_s above {longest_s:.0f}",
        )


def seconds(value: str) -> float | None:
    """A duration as UCX reads it, e.g. `20s`, `500ms`, `1000000.00us`, `inf`; None for anything else."""
    if value.strip().lower() in ("inf", "infinity"):
        return math.inf
    match = re.fullmatch(
        r"\s*(?P<number>[0-9]+(?:\.[0-9]*)?)\s*(?P<unit>us|ms|s|m|)\s*", value
    )
    if match is None:
        return None
    return float(match["number"]) * _UNITS_S[match["unit"]]
