"""The loopback transfer: findings from invented results, UCX's log, and processes that fail in every way."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding
from kvferry.cli.doctor.loopback import check_loopback, judge_log, judge_reads
from kvferry.cli.transfer.messages import Kind, Measured
from tests.cli.owners import READS, scripted

pytestmark = pytest.mark.slow

LOG = """\
[1795314891.7] [host:12157:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/nixl_cu13/../nixl_cu13.libs/libucp.so)
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  unused environment variables: UCX_NET_DEVICE (maybe: UCX_NET_DEVICES?); UCX_FOOBAR
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)
[1795314891.8] [host:12157:0]          parser.c:2587 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info
"""  # noqa: E501 - as UCX writes them
LARGE = msgspec.structs.replace(READS, num_bytes=16 << 20, descriptors=1, gb_s=10.5)
SMALL = msgspec.structs.replace(LARGE, num_bytes=4096, gb_s=0.8)
SCATTERED = msgspec.structs.replace(LARGE, descriptors=1024, gb_s=0.02)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    assert all(one.do for one in findings if one.mark in ("look", "broken"))
    return {finding.check or "loopback": finding for finding in findings}


def judged(kind: Kind, transports: str, **changes: Any) -> dict[str, Finding]:
    measured = Measured(
        listener="p0",
        transports=transports,
        first_contact_ms=5.0,
        reads=(SMALL, msgspec.structs.replace(LARGE, **changes), SCATTERED),
    )
    return by_check(list(judge_reads(kind, measured)))


@pytest.mark.parametrize(
    ("kind", "changes", "mark", "said"),
    [
        ("DRAM", {}, "ok", "10.5 GB/s, first contact 5.0 ms, over am(tcp/lo cma)"),
        ("DRAM", {"gb_s": 0.2}, "look", "0.2 GB/s"),
        ("VRAM", {"gb_s": 2.1}, "look", "2.1 GB/s"),
        ("DRAM", {"wrong": 3}, "broken", "3 bytes arrived that are not the owner's"),
    ],
)
def test_a_good_a_slow_and_a_wrong_transfer(
    kind: Kind, changes: dict[str, Any], mark: str, said: str
) -> None:
    finding = judged(kind, "am(tcp/lo cma)", **changes)["loopback"]
    assert (finding.mark, said in finding.found) == (mark, True), finding
    if mark == "look":
        assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in finding.do) is (kind == "VRAM")


@pytest.mark.parametrize(
    ("transports", "mark"),
    [
        ("am(tcp/lo cma)", "ok"),
        ("rma(sysv posix) am(sysv cma)", "ok"),
        ("rma(xpmem)", "ok"),
        ("tcp", "look"),
    ],
)
def test_reads_past_the_other_process_need_a_permission_that_is_named(
    transports: str, mark: str
) -> None:
    finding = judged("DRAM", transports)["reads between processes"]
    assert (finding.mark, "SYS_PTRACE" in finding.do) == (mark, mark == "look")


def test_versions_and_unknown_variables_are_read_from_ucx_log() -> None:
    found = by_check(list(judge_log(LOG)))
    assert found["NIXL library"].found == "nixl_cu13, UCX 1.23.0"
    assert found["UCX names"].mark == "look"
    assert "UCX_NET_DEVICES?); UCX_FOOBAR" in found["UCX names"].found
    assert by_check(list(judge_log(LOG.splitlines()[0])))["UCX names"].mark == "ok"
    assert by_check(list(judge_log("")))["UCX names"].mark == "not done"


OWNING = """
if task.offer is None:
    send(pipe, OFFER)
    receive(pipe)
"""
READING = f"{OWNING}send(pipe, CaseProgress(what='first contact'))\n"


def loopback_dram(code: str, timeout_s: float = 30.0, **environ: str) -> Finding:
    machine = Machine({**os.environ, **environ}, timeout_s=timeout_s)
    findings = list(check_loopback(machine, command=scripted(code)))
    return by_check(findings)["loopback"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ValueError('odd')",
            "ended with status 1: ValueError: odd, while loading NIXL",
        ),
        (
            "print('x UCX  ERROR none', flush=True); os.abort()",
            "ended with signal 6; UCX says: none",
        ),
        (f"{READING}os.abort()", "ended with signal 6, while first contact"),
        (
            "send(pipe, Failed(reason='make agent: no'))",
            "make agent: no, while loading NIXL",
        ),
    ],
)
def test_processes_that_die_or_fail_are_reported_with_their_stage(
    code: str, said: str
) -> None:
    finding = loopback_dram(code)
    assert (finding.mark, said in finding.found) == ("broken", True), finding


LATE = f"{READING}send(pipe, Failed(reason='a read did not end', late=True)); signal.pause()"
SLOW = f"{READING}while True: send(pipe, CaseProgress(what='x')); time.sleep(0.1)"
DEADLINES = {
    "slow start": ("signal.pause()", 0.0, "look"),
    "slow read": (LATE, 0.0, "broken"),
    "slow read on a busy machine": (LATE, 99.0, "look"),
    "hang": (f"{READING}signal.pause()", 0.0, "broken"),
    "slow reads": (SLOW, 0.0, "look"),
}


@pytest.mark.parametrize(("code", "load", "mark"), DEADLINES.values(), ids=DEADLINES)
def test_a_missed_deadline_is_broken_only_during_a_read_on_an_idle_machine(
    code: str, load: float, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_core = load * (os.cpu_count() or 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (per_core, 0.0, 0.0))
    assert loopback_dram(code, 8.0).mark == mark


def test_processes_that_hang_are_ended_with_their_children(tmp_path: Path) -> None:
    """Each holds a pipe open, which closes when all have ended."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started_s = time.monotonic()
    hang = f"os.fork()\nfile = os.open({str(fifo)!r}, os.O_WRONLY)\nos.write(file, b'x')\nsignal.pause()"
    loopback_dram(hang, 4.0)
    assert time.monotonic() - started_s < 120, "they hang for ever"
    assert os.read(reading, 100), "no process ever began"
    ended, _, _ = select.select([reading], [], [], 10)
    assert ended, "a child lives"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_the_processes_keep_ucx_settings_and_not_those_of_an_engines_telemetry() -> (
    None
):
    code = "send(pipe, Failed(reason=' '.join(f'{k}={v}' for k, v in os.environ.items() if k[:4] in ('UCX_', 'NIXL'))))"
    seen = loopback_dram(
        code, UCX_TLS="tcp", NIXL_TELEMETRY_ENABLE="y", UCX_WARN_UNUSED_ENV_VARS="n"
    ).found
    assert "UCX_TLS=tcp" in seen
    assert "UCX_WARN_UNUSED_ENV_VARS=y" in seen
    assert "NIXL_TELEMETRY" not in seen


def test_gpu_memory_is_tried_where_there_is_a_gpu_and_must_work_there() -> None:
    no_cuda = scripted("send(pipe, Failed(reason='no CUDA'))")
    with_gpu = Machine(dict(os.environ), gpus=("GPU",))
    (finding,) = check_loopback(with_gpu, "cuda", no_cuda)
    assert (finding.mark, finding.found) == ("broken", "no CUDA, while loading NIXL")
    assert list(check_loopback(Machine(dict(os.environ)), "cuda", no_cuda)) == []
