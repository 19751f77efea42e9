"""The loopback transfer: findings from invented results, UCX's log, and processes that fail in every way."""

from __future__ import annotations

import ctypes
import json
import os
import select
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli.doctor.cuda_memory import CudaMemory, CudaUnavailable
from kvferry.cli.doctor.findings import Finding, Mark
from kvferry.cli.doctor.loopback import run_loopback
from kvferry.cli.doctor.loopback_pair import ROW_BYTES, ROWS, TOTAL_BYTES, pattern
from kvferry.cli.doctor.transfer import CONNECTING, STARTING, TOO_LATE, Loopback, Read, UcxLog, judge_loopback, read_log

pytestmark = pytest.mark.slow

LOG = """\
[1795314891.7] [host:12157:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so)
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  unused environment variables: UCX_NET_DEVICE (maybe: UCX_NET_DEVICES?); UCX_FOOBAR
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)
[1795314891.8] [host:12157:0]          parser.c:2587 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info
[1795314891.9] [host:12157:0]      ucp_worker.c:1997 UCX  INFO    c-1 self cfg#0 rma(self/memory)  am(self/memory)
[1795314893.2] [host:12157:0]      ucp_worker.c:1997 UCX  INFO    c-1 intra-node cfg#1 rma(sysv/memory posix/memory)  am(sysv/memory cma/memory)
"""  # noqa: E501 - as UCX writes them
GOOD_LOG = UcxLog("1.23.0", "", "am(sysv cma)")
GOOD = Read("DRAM", bytes=1 << 30, best_s=0.1, first_ms=5.0, equal=True)


def judged(loopback: Loopback, gpus: int = 0) -> dict[str, Finding]:
    findings = {finding.check: finding for finding in judge_loopback(loopback, gpus)}
    assert all(one.do for one in findings.values() if one.mark in (Mark.LOOK, Mark.BROKEN))
    return findings


def test_version_lanes_and_errors_are_read_from_ucx_log() -> None:
    assert read_log(LOG) == UcxLog(
        version="1.23.0",
        unused="UCX_NET_DEVICE (maybe: UCX_NET_DEVICES?); UCX_FOOBAR",
        lanes="rma(sysv posix) am(sysv cma)",
    )
    assert read_log("") == UcxLog()
    error = "[1.2] [host:1:0]  select.c:640 UCX  ERROR no active messages transport to <no debug data>"
    assert read_log(LOG + error).error == "no active messages transport to <no debug data>"


def test_a_good_transfer_has_its_rate_and_transports() -> None:
    found = judged(Loopback("nixl_cu12", (GOOD,), GOOD_LOG, files_per_peer=8))
    assert {one.mark for one in found.values()} == {Mark.OK}
    assert found["loopback DRAM"].found == "10.7 GB/s, first contact 5.0 ms, over am(sysv cma)"
    assert found["NIXL library"].found == "nixl_cu12, UCX 1.23.0"


@pytest.mark.parametrize(
    ("read", "mark", "said"),
    [
        (Read("DRAM", 1 << 30, 10.0, 5.0, equal=True), Mark.LOOK, "0.1 GB/s"),
        (Read("VRAM", 1 << 30, 0.5, 5.0, equal=True), Mark.LOOK, "2.1 GB/s"),
        (Read("DRAM", 1 << 30, 0.1, 5.0, equal=False), Mark.BROKEN, "not the owner's"),
        (Read("DRAM", wrong="read: refused"), Mark.BROKEN, "read: refused"),
        (Read("VRAM", wrong="register: refused"), Mark.BROKEN, "register: refused"),
    ],
)
def test_a_slow_a_wrong_and_a_refused_transfer(read: Read, mark: Mark, said: str) -> None:
    finding = judged(Loopback("nixl_cu12", (read,), GOOD_LOG))[f"loopback {read.kind}"]
    assert (finding.mark, said in finding.found) == (mark, True), finding


@pytest.mark.parametrize(
    ("stage", "load", "mark"),
    [
        (STARTING, 0.1, Mark.LOOK),
        (CONNECTING, 0.1, Mark.LOOK),
        ("reading DRAM", 0.1, Mark.BROKEN),
        ("reading DRAM", 9.0, Mark.LOOK),
    ],
)
def test_a_missed_deadline_is_broken_only_during_a_read_on_an_idle_machine(stage: str, load: float, mark: Mark) -> None:
    late = Loopback("nixl_cu12", (), GOOD_LOG, stage=stage, failure=TOO_LATE, load_per_core=load)
    assert judged(late)["loopback transfer"].mark is mark


def test_a_failure_is_broken_on_a_busy_machine_too_and_ends_with_ucx_error() -> None:
    log = UcxLog("1.23.0", error="no transport")
    failed = Loopback("nixl_cu12", log=log, stage=CONNECTING, failure="refused", load_per_core=9.0)
    finding = judged(failed)["loopback transfer"]
    assert (finding.mark, finding.found) == (Mark.BROKEN, "refused while making two agents; UCX says: no transport")


def test_gpu_memory_that_was_not_tried_is_reported_and_a_look_on_machines_with_gpus() -> None:
    tried = Loopback("nixl_cu12", (GOOD,), GOOD_LOG, no_cuda="libcuda.so.1: cannot open")
    assert judged(tried)["loopback VRAM"].mark is Mark.NOT_DONE
    assert judged(tried, gpus=8)["loopback VRAM"].mark is Mark.LOOK
    assert "loopback VRAM" not in judged(Loopback("nixl_cu12", (GOOD,), GOOD_LOG))


def test_names_are_not_judged_where_ucx_was_not_started() -> None:
    assert judged(Loopback(stage=STARTING, failure="no NIXL"))["UCX names"].mark is Mark.NOT_DONE


def pair(*lines: dict[str, object], then: str = "") -> tuple[str, ...]:
    """A pair that reports these lines and then runs other code."""
    tell = "; ".join(f"print({json.dumps(json.dumps(line))}, flush=True)" for line in lines)
    return ("-c", f"import os, signal, sys; {tell or 'pass'}; {then or 'pass'}")


READ = {"kind": "DRAM", "bytes": 8, "best_s": 1.0, "first_ms": 1.0, "equal": True}


def test_a_pair_that_reports_everything_gives_a_full_result() -> None:
    reported: tuple[dict[str, object], ...] = (
        {"bindings": "nixl_cu13"},
        {"reading": "DRAM"},
        {"read": READ},
        {"files": 7},
        {"end": True},
    )
    found = run_loopback({}, 30, pair(*reported))
    assert (found.bindings, found.reads, found.files_per_peer) == ("nixl_cu13", (Read(**READ),), 7)  # type: ignore[arg-type]
    assert (found.stage, found.failure) == ("", "")


@pytest.mark.parametrize(
    ("lines", "then", "stage", "said"),
    [
        ((), "raise ValueError('odd')", STARTING, "its process ended: ValueError: odd"),
        (({"bindings": "x"},), "os.abort()", CONNECTING, "its process ended"),
        (({"bindings": "x"}, {"reading": "DRAM"}), "os.abort()", "reading DRAM", "its process ended"),
        (({"bindings": "x"}, {"failed": "make agent: no"}), "", CONNECTING, "make agent: no"),
    ],
)
def test_a_pair_that_dies_or_fails_is_reported_with_its_stage(
    lines: tuple[dict[str, object], ...], then: str, stage: str, said: str
) -> None:
    found = run_loopback({}, 30, pair(*lines, then=then))
    assert (found.stage, found.failure) == (stage, said)


def test_a_pair_that_hangs_is_ended_with_its_child_at_the_deadline(tmp_path: Path) -> None:
    """The child holds a pipe open, which closes when the child ends."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    hold = f"os.fork(); os.open({str(fifo)!r}, os.O_WRONLY); signal.pause()"
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started = time.monotonic()
    found = run_loopback({}, 4.0, pair({"bindings": "x"}, {"reading": "DRAM"}, then=hold))
    assert (found.stage, found.failure) == ("reading DRAM", TOO_LATE)
    assert time.monotonic() - started < 20
    ended, _, _ = select.select([reading], [], [], 10)
    assert ended, "the child lives"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_lines_that_a_library_prints_are_ignored() -> None:
    noise = ("-c", "print('hello'); print('[1]'); print('{\"bindings\": \"x\"}'); print('{\"end\": true}')")
    assert run_loopback({}, 30, noise).bindings == "x"


def test_the_pair_keeps_the_settings_of_ucx_and_not_those_of_the_engines_telemetry() -> None:
    environ = {"UCX_TLS": "tcp", "NIXL_TELEMETRY_ENABLE": "y", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    then = "print(__import__('json').dumps({'failed': ' '.join(sorted(f'{k}={v}' for k, v in os.environ.items()))}))"
    seen = run_loopback(environ, 30, pair(then=then)).failure.split()
    assert "UCX_TLS=tcp" in seen
    assert "UCX_WARN_UNUSED_ENV_VARS=y" in seen
    assert not [one for one in seen if one.startswith("NIXL_TELEMETRY")]


def test_the_owners_bytes_show_rows_that_were_mixed_up() -> None:
    rows = pattern().reshape(ROWS, ROW_BYTES)
    assert len(np.unique(rows[:, :64], axis=0)) == ROWS
    assert np.count_nonzero(rows == 0) < TOTAL_BYTES // 100


class Driver:
    """The used functions of libcuda, with the GPU's memory in the host."""

    def __init__(self, refusing: str = "") -> None:
        self.refusing = refusing
        self.memory = ctypes.create_string_buffer(16)

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            if name == self.refusing:
                return 100
            if name == "cuMemAlloc_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = ctypes.addressof(self.memory)  # type: ignore[arg-type]
            if name.startswith("cuMemcpy"):
                target, source, length = (int(one.value) for one in arguments)  # type: ignore[attr-defined]
                ctypes.memmove(target, source, length)
            return 0

        return call


def test_gpu_memory_is_filled_and_fetched_whole() -> None:
    driver = Driver()
    memory = CudaMemory(16, driver)
    source, target = ctypes.create_string_buffer(b"0123456789abcdef", 16), ctypes.create_string_buffer(16)
    memory.fill(ctypes.addressof(source))
    assert driver.memory.raw == source.raw
    memory.fetch(ctypes.addressof(target))
    assert target.raw == source.raw


@pytest.mark.parametrize("refusing", ["cuInit", "cuDeviceGet", "cuMemAlloc_v2"])
def test_a_driver_that_refuses_means_no_gpu_memory(refusing: str) -> None:
    with pytest.raises(CudaUnavailable, match=refusing):
        CudaMemory(16, Driver(refusing))
