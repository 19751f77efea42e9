"""`UCX_*` variables that are known to cause hangs, leaks or slow transfers.

Variables that kvferry sets itself are judged as it would set them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from kvferry.cli.doctor.devices import Devices
from kvferry.cli.doctor.findings import Finding, broken, look, ok

CHECK = "UCX settings"

_MESSAGES = re.compile(r"all|ib|tcp|srd|(rc|dc|ud)(_v|_x|_verbs|_mlx5)?")
_SHARED_MEMORY = re.compile(r"sm|shm|mm|posix|sysv|xpmem")
_CUDA = re.compile(r"all|cuda|cuda_copy|cuda_ipc|gdr_copy")
_LOUD = ("debug", "trace", "req", "data", "async", "func", "poll")
_NO = ("n", "no", "off", "0")
_GRACE_S = 60.0
_SHORT_S = 60.0
_HARDWARE_FACTOR = 4
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def judge_ucx(own: Mapping[str, str], machine: Devices, added: Mapping[str, str]) -> Iterator[Finding]:
    """All known problems; if there are none, the settings.

    `own`: the environment. `added`: variables that a worker of kvferry adds to it.
    """
    environ = {**added, **own}
    troubles = [
        *_transports(environ, machine),
        *_tcp_segments(environ),
        *_net_devices(environ, machine),
        *_dead_peers(environ),
        *_retries(environ),
        *_control_lane(environ),
        *_leak(environ, machine),
        *_loudness(environ),
    ]
    if troubles:
        yield from troubles
        return
    yield ok(CHECK, f"{_written(own) or 'none set'}; kvferry adds {_written(added) or 'none'}")


def unused_names(said: str) -> Finding:
    """UCX's own list of variables that it did not use, with its guesses."""
    if not said:
        return ok("UCX names", "UCX knows every UCX_ variable that is set")
    return look(
        "UCX names", f"UCX does not know {said}", "correct or unset them; names of other UCX versions do nothing"
    )


def _written(environ: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith("UCX_"))


def _listed(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The transports that `UCX_TLS` allows; None if it allows everything or only excludes some."""
    value = environ.get("UCX_TLS", "all").strip()
    names = tuple(name.strip().partition(":")[0].removeprefix("\\") for name in value.split(",") if name.strip())
    return None if value.startswith("^") or "all" in names else names


def _transports(environ: Mapping[str, str], machine: Devices) -> Iterator[Finding]:
    names = _listed(environ)
    if names is None:
        return
    said = f"UCX_TLS={environ['UCX_TLS']}"
    messages = any(_MESSAGES.fullmatch(name) for name in names)
    shared = any(_SHARED_MEMORY.fullmatch(name) for name in names)
    if not messages and not shared:
        found = f"{said} has no transport for messages: no agent can be made"
        yield broken(CHECK, found, "unset UCX_TLS, or add rc (InfiniBand, RoCE) or tcp to it")
    elif not messages and environ.get("UCX_MM_ERROR_HANDLING", "").lower() in _NO:
        found = f"{said} with UCX_MM_ERROR_HANDLING=n: shared memory alone cannot make an agent then"
        yield broken(CHECK, found, "unset UCX_MM_ERROR_HANDLING: kvferry sets it")
    elif not messages:
        yield look(
            CHECK, f"{said} reaches peers on this host only", "unset UCX_TLS, or add rc or tcp, for peers elsewhere"
        )
    if machine.gpus and not any(_CUDA.fullmatch(name) for name in names):
        found = f"{said} has no transport for GPU memory, on a machine with GPUs"
        yield broken(CHECK, found, f"export UCX_TLS={environ['UCX_TLS']},cuda")
    if machine.gpus and "cuda_copy" in names and not {"cuda", "cuda_ipc"} & set(names):
        found = f"{said} has no cuda_ipc: reads between GPUs of this host go through host memory"
        yield look(CHECK, found, f"export UCX_TLS={environ['UCX_TLS']},cuda_ipc")


def _tcp_segments(environ: Mapping[str, str]) -> Iterator[Finding]:
    if _listed(environ) != ("tcp",):
        return
    wanted = [f"UCX_TCP_{way}_SEG_SIZE" for way in ("TX", "RX")]
    missing = [name for name in wanted if name not in environ]
    if missing:
        found = f"UCX_TLS=tcp without {' and '.join(missing)}: reads were 4 to 5 times slower"
        yield look(CHECK, found, "export " + " ".join(f"{name}=256k" for name in missing))


def _net_devices(environ: Mapping[str, str], machine: Devices) -> Iterator[Finding]:
    value = environ.get("UCX_NET_DEVICES", "all").strip()
    active = [port.name for port in machine.ports if port.active]
    if value == "all":
        if len(active) > 1 and len(active) < len(machine.ports):
            found = "UCX_NET_DEVICES is not set, and not every NIC port is up: transfers were seen to hang"
            yield look(CHECK, found, f"export UCX_NET_DEVICES={','.join(active)}")
        return
    if value.startswith("^"):
        return
    there = {*machine.interfaces, *(port.name for port in machine.ports)}
    named = [name.strip() for name in value.split(",") if name.strip()]
    # A range or a pattern is left to UCX.
    missing = [name for name in named if name not in there and not re.search(r"[\[\]*?]", name)]
    if missing:
        has = ", ".join(sorted(there)) or "none"
        found = f"UCX_NET_DEVICES names {', '.join(missing)}, not on this machine, which has {has}"
        yield broken(CHECK, found, f"export UCX_NET_DEVICES={','.join(active) or 'all'}, or unset it")
    down = [port.name for port in machine.ports if port.name in named and not port.active]
    if down:
        do = f"export UCX_NET_DEVICES={','.join(active) or 'all'}"
        yield broken(CHECK, f"UCX_NET_DEVICES names {', '.join(down)}, which is down", do)


def _dead_peers(environ: Mapping[str, str]) -> Iterator[Finding]:
    if environ.get("UCX_MM_ERROR_HANDLING", "n").lower() in _NO:
        return
    value = environ.get("UCX_KEEPALIVE_INTERVAL", "300s")
    interval_s = seconds(value)
    do = "unset UCX_KEEPALIVE_INTERVAL: kvferry sets it to 300s"
    if interval_s in (0.0, math.inf):
        found = f"UCX_KEEPALIVE_INTERVAL={value}: over shared memory alone a read from a dead peer may never end"
        yield look(CHECK, found, do)
    elif interval_s is not None and interval_s < _SHORT_S:
        found = f"UCX_KEEPALIVE_INTERVAL={value}: with a short interval a frozen peer on this host makes a core spin"
        yield look(CHECK, found, do)


def _retries(environ: Mapping[str, str]) -> Iterator[Finding]:
    timeout_s, retries = seconds(environ.get("UCX_RC_TIMEOUT", "1s")), environ.get("UCX_RC_RETRY_COUNT", "7")
    if timeout_s is None or not retries.isdecimal():
        return
    longest_s = timeout_s * int(retries) * _HARDWARE_FACTOR
    if longest_s >= _GRACE_S:
        said = f"UCX_RC_TIMEOUT × UCX_RC_RETRY_COUNT lets a failed read write for {longest_s:.0f} s"
        found = f"{said}, longer than failed_read_grace_s (60)"
        yield look(CHECK, found, f"unset both, or set failed_read_grace_s above {longest_s:.0f}")


def _control_lane(environ: Mapping[str, str]) -> Iterator[Finding]:
    value, names = environ.get("UCX_MM_ERROR_HANDLING", "n"), _listed(environ)
    if value.lower() not in _NO and ("tcp" in names if names is not None else "^tcp" not in environ.get("UCX_TLS", "")):
        found = f"UCX_MM_ERROR_HANDLING={value}: a process killed in mid-message can hang others of its host"
        yield look(CHECK, found, "unset UCX_MM_ERROR_HANDLING: messages within the host then go over loopback TCP")


def _leak(environ: Mapping[str, str], machine: Devices) -> Iterator[Finding]:
    if machine.ports and environ.get("UCX_RCACHE_MAX_UNRELEASED", "inf") == "inf":
        found = "UCX_RCACHE_MAX_UNRELEASED has no bound: UCX's cache of registered memory was seen to leak"
        yield look(CHECK, found, "export UCX_RCACHE_MAX_UNRELEASED=1024")


def _loudness(environ: Mapping[str, str]) -> Iterator[Finding]:
    level = environ.get("UCX_LOG_LEVEL", "warn")
    if level.lower().startswith(_LOUD):
        yield look(CHECK, f"UCX_LOG_LEVEL={level} slows every transfer", "export UCX_LOG_LEVEL=warn")


def seconds(value: str) -> float | None:
    """A duration as UCX reads it, e.g. `20s`, `500ms`, `1000000.00us`, `inf`; None for anything else."""
    if value.strip().lower() in ("inf", "infinity"):
        return math.inf
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(us|ms|s|m|)\s*", value)
    return float(found[1]) * _UNITS_S[found[2]] if found else None
