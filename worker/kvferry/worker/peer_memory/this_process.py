"""This process as others of its host find it, and which others are near enough to map their memory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import SharedMemory

_UNKNOWN = f"unknown-{secrets.token_hex(16)}"
"""For what the kernel or a sandbox does not say of this process: it is no other's, so nothing is mapped."""


class NotMappable(KvferryError):
    """Memory of another process cannot be mapped; it is read over NIXL."""


def this_process() -> SharedMemory:
    """This process, which shares nothing so far."""
    return SharedMemory(
        machine=machine_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        ipc_namespace=ipc_namespace(),
    )


def check_near(shared: SharedMemory) -> None:
    """Check that a process is of this host and PID namespace, and shares anything.

    Raises:
        NotMappable: it is not, or does not.
    """
    if shared.machine != machine_id():
        raise NotMappable("the producer is on another host")
    if shared.pid_namespace != pid_namespace():
        raise NotMappable(
            "the producer is in another PID namespace: start both containers with --pid=host, or hostPID"
        )
    if not shared.allocations:
        raise NotMappable(f"the producer's memory cannot be shared: {shared.why_not}")


def machine_id() -> str:
    """The boot id of the kernel, the same in all containers of a host; no other process's if it is not known."""
    # Every worker asks, whatever memory its caches lie in: no engine may fail to start for it.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or _UNKNOWN
    except OSError:
        return _UNKNOWN


def pid_namespace() -> str:
    """The namespace in which this process's number counts, e.g. `pid:[4026531836]`; no other process's if it is not
    known."""
    return _namespace("pid") or _UNKNOWN


def ipc_namespace() -> str | None:
    """The namespace of System V and POSIX shared memory, e.g. `ipc:[4026531839]`; None if it is not known."""
    return _namespace("ipc")


def _namespace(kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return None
