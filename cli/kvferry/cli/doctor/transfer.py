"""Findings from the loopback transfer: whether NIXL works here, how fast, and over which transports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.cli.doctor.findings import Finding, broken, look, not_done, ok
from kvferry.cli.doctor.ucx import unused_names

BUSY = 2.0
"""Load per core above which a missed deadline proves nothing."""
SLOW_GB_S = {"DRAM": 0.5, "VRAM": 5.0}
"""Slower transfers point to a wrong transport, or to a busy machine."""

_VERSION = re.compile(r"UCX +INFO +Version ([0-9.]+)")
_UNUSED = re.compile(r"UCX +WARN +unused environment variables?: (.+)")
_LANES = re.compile(r"intra-node cfg#[0-9]+ +(.*)")
_ERROR = re.compile(r"UCX +ERROR +(.+)")


@dataclass(frozen=True, slots=True)
class Read:
    """One kind of memory: bytes of one transfer, seconds of the best one, milliseconds of the first contact.

    equal: whether every byte equals the owner's. wrong: why it could not be read, else empty.
    """

    kind: str
    bytes: int = 0
    best_s: float = 0.0
    first_ms: float = 0.0
    equal: bool = False
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class UcxLog:
    """From UCX's log: its version, variables that it did not use, lanes between the two, its last error."""

    version: str = ""
    unused: str = ""
    lanes: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Loopback:
    """The result of the loopback transfer.

    Attributes:
        bindings: the package that was loaded, e.g. `nixl_cu12`.
        reads: one per kind of memory that was tried.
        log: the reader's log of UCX.
        files_per_peer: files that the connection to the owner opened in the reader; None if unknown.
        no_cuda: why GPU memory was not tried, `""` if it was.
        stage: the stage in which it ended early, `""` if it did not.
        failure: why it ended early: an error's text, or `TOO_LATE`.
        load_per_core: runnable processes per core, of the last minute.
    """

    bindings: str = ""
    reads: tuple[Read, ...] = ()
    log: UcxLog = UcxLog()
    files_per_peer: int | None = None
    no_cuda: str = ""
    stage: str = ""
    failure: str = ""
    load_per_core: float = 0.0


STARTING = "loading NIXL"
CONNECTING = "making two agents"
READING = "reading"
TOO_LATE = "not done in time"


def read_log(text: str) -> UcxLog:
    """Read UCX's log at level info."""
    versions, unused, lanes, errors = (one.findall(text) for one in (_VERSION, _UNUSED, _LANES, _ERROR))
    return UcxLog(
        version=versions[0] if versions else "",
        unused=unused[0].strip() if unused else "",
        lanes=" ".join(lanes[-1].replace("/memory", "").split()) if lanes else "",
        error=errors[-1].strip() if errors else "",
    )


def judge_loopback(loopback: Loopback, gpus: int) -> Iterator[Finding]:
    """The library, the transfers, and the names of variables that UCX did not know. `gpus`: how many are here."""
    check = "loopback transfer"
    if loopback.bindings:
        version = loopback.log.version
        yield ok("NIXL library", f"{loopback.bindings}, UCX {version or 'of unknown version'}")
    for read in loopback.reads:
        yield _read(read, loopback.log.lanes)
    if loopback.no_cuda and gpus:
        do = "give the process the driver (Docker: --gpus all), or find out why it refuses (nvidia-smi)"
        yield look("loopback VRAM", f"{gpus} GPUs, but no memory on the first: {loopback.no_cuda}", do)
    elif loopback.no_cuda:
        yield not_done("loopback VRAM", f"no GPU, no CUDA: {loopback.no_cuda}")
    if loopback.failure:
        yield _failure(check, loopback)
    if loopback.log.version:
        yield unused_names(loopback.log.unused)
    else:
        yield not_done("UCX names", "UCX was not started; only UCX can check the names of its variables")


def _failure(check: str, loopback: Loopback) -> Finding:
    found = f"{loopback.failure} while {loopback.stage}"
    if loopback.failure == TOO_LATE and (not loopback.stage.startswith(READING) or loopback.load_per_core > BUSY):
        # A read that does not end says something about the fabric; a slow start, or a busy machine, does not.
        found = f"{found}; load {loopback.load_per_core:.1f} per core"
        return look(check, found, "kvferry doctor --timeout 60, when the machine is idle")
    if loopback.log.error:
        found = f"{found}; UCX says: {loopback.log.error}"
    if loopback.stage == STARTING:
        return broken(check, found, "see the findings about versions; NIXL needs torch")
    return broken(check, found, "see the findings about UCX; unset every UCX_ variable and try again")


def _read(read: Read, lanes: str) -> Finding:
    check = f"loopback {read.kind}"
    if read.wrong:
        if read.kind == "VRAM":
            return broken(
                check, read.wrong, "check the CUDA build of NIXL (nixl_cu12, nixl_cu13) against the driver's CUDA"
            )
        return broken(check, read.wrong, "see the findings about UCX and limits")
    if not read.equal:
        return broken(check, "bytes arrived that are not the owner's", "do not serve from this machine; report it")
    gb_s = read.bytes / read.best_s / 1e9 if read.best_s else 0.0
    found = f"{gb_s:.1f} GB/s, first contact {read.first_ms:.1f} ms, over {lanes or 'transports that UCX did not name'}"
    if gb_s < SLOW_GB_S.get(read.kind, 0.0):
        return look(check, found, "try again on an idle machine; then look at UCX_TLS and at reads between processes")
    return ok(check, found)
