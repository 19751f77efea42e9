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
from kvferry.cli.doctor.findings import Finding, Mark
from kvferry.cli.doctor.loopback import (
    check_loopback,
    judge_log,
    judge_outcome,
)
from kvferry.cli.transfer.child import Outcome
from kvferry.cli.transfer.messages import Kind, Measured
from tests.cli.owners import OFFER, READS, scripted

pytestmark = pytest.mark.slow

LOG = """\
[1795314891.7] [host:12157:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/nixl_cu13/../nixl_cu13.libs/libucp.so)
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  unused environment variables: UCX_NET_DEVICE (maybe: UCX_NET_DEVICES?); UCX_FOOBAR
[1795314891.8] [host:12157:0]          parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)
[1795314891.8] [host:12157:0]          parser.c:2587 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info
"""  # noqa: E501 - as UCX writes them
LARGE = msgspec.structs.replace(READS, num_bytes=16 << 20, descriptors=1, p50_us=1600.0)
SMALL = msgspec.structs.replace(LARGE, num_bytes=4096, p50_us=5.0)
SCATTERED = msgspec.structs.replace(LARGE, descriptors=1024, p50_us=1e6)


def outcome(lanes: str = "am(tcp/lo cma)", **changes: Any) -> Outcome:
    largest = msgspec.structs.replace(LARGE, **changes)
    measured = Measured(first_contact_ms=5.0, reads=(SMALL, largest, SCATTERED))
    return Outcome(OFFER.host, lanes, measured)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    assert all(one.do for one in findings if one.mark in (Mark.LOOK, Mark.BROKEN))
    return {finding.check or "loopback": finding for finding in findings}


@pytest.mark.parametrize(
    ("kind", "changes", "mark", "said"),
    [
        ("DRAM", {}, Mark.OK, "10.5 GB/s, first contact 5.0 ms, over am(tcp/lo cma)"),
        ("DRAM", {"p50_us": 1e5}, Mark.LOOK, "0.2 GB/s"),
        ("VRAM", {"p50_us": 8000.0}, Mark.LOOK, "2.1 GB/s"),
        ("DRAM", {"wrong": 3}, Mark.BROKEN, "3 bytes arrived that are not the owner's"),
    ],
)
def test_a_good_a_slow_and_a_wrong_transfer(
    kind: Kind, changes: dict[str, Any], mark: Mark, said: str
) -> None:
    finding = by_check(list(judge_outcome(kind, outcome(**changes))))["loopback"]
    assert (finding.mark, said in finding.found) == (mark, True), finding
    if mark is Mark.LOOK:
        assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in finding.do) is (kind == "VRAM")


@pytest.mark.parametrize(
    ("lanes", "mark"),
    [
        ("am(tcp/lo cma)", Mark.OK),
        ("rma(sysv posix) am(sysv cma)", Mark.OK),
        ("rma(xpmem)", Mark.OK),
        ("tcp", Mark.LOOK),
    ],
)
def test_reads_past_the_other_process_need_a_permission_that_is_named(
    lanes: str, mark: Mark
) -> None:
    finding = by_check(list(judge_outcome("DRAM", outcome(lanes))))[
        "reads between processes"
    ]
    assert finding.mark is mark
    assert ("SYS_PTRACE" in finding.do) is (mark is Mark.LOOK)


def test_versions_and_unknown_variables_are_read_from_ucx_log() -> None:
    found = by_check(list(judge_log(LOG)))
    assert found["NIXL library"].found == "nixl_cu13, UCX 1.23.0"
    assert (
        found["UCX names"].mark,
        "UCX_NET_DEVICES?); UCX_FOOBAR" in found["UCX names"].found,
    ) == (Mark.LOOK, True)
    found = by_check(list(judge_log(LOG.splitlines()[0])))
    assert found["UCX names"].mark is Mark.OK
    assert by_check(list(judge_log("")))["UCX names"].mark is Mark.NOT_DONE


AGENT = "pipe.send(OFFER)\npipe.take()\n"
READING = AGENT + "pipe.send(CaseProgress(what='first contact'))\n"


def loopback_dram(code: str, timeout_s: float = 30.0, **environ: str) -> Finding:
    machine = Machine({**os.environ, **environ}, timeout_s=timeout_s)
    return by_check(list(check_loopback(machine, command=scripted(code))))["loopback"]


DEATHS = [
    (
        "raise ValueError('odd')",
        "ended with status 1: ValueError: odd, while loading NIXL",
    ),
    ("print('x UCX  ERROR none'); os.abort()", "ended with signal 6; UCX says: none"),
    (f"{READING}os.abort()", "ended with signal 6, while first contact"),
    (
        "pipe.send(Failed(reason='make agent: no'))",
        "make agent: no, while loading NIXL",
    ),
    ("pipe.send(CaseProgress(what='x'))", "message: CaseProgress, while loading NIXL"),
]


@pytest.mark.parametrize(("code", "said"), DEATHS)
def test_processes_that_die_or_fail_are_reported_with_their_stage(
    code: str, said: str
) -> None:
    finding = loopback_dram(code)
    assert (finding.mark, said in finding.found) == (Mark.BROKEN, True), finding


LATE = f"{READING}pipe.send(Failed(reason='a read did not end', late=True)); signal.pause()"
SLOW = f"{READING}import time\nwhile True: pipe.send(CaseProgress(what='x')); time.sleep(0.1)"
DEADLINES = {
    "slow start": ("signal.pause()", 0.0, Mark.LOOK),
    "slow read": (LATE, 0.0, Mark.BROKEN),
    "slow read on a busy machine": (LATE, 99.0, Mark.LOOK),
    "hang": (f"{READING}signal.pause()", 0.0, Mark.BROKEN),
    "slow reads": (SLOW, 0.0, Mark.LOOK),
}


@pytest.mark.parametrize(("code", "load", "mark"), DEADLINES.values(), ids=DEADLINES)
def test_a_missed_deadline_is_broken_only_during_a_read_on_an_idle_machine(
    code: str, load: float, mark: Mark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0)
    )
    monkeypatch.setattr("kvferry.cli.transfer.child._GRACE_S", 0.1)
    assert loopback_dram(code, 10.0).mark is mark


def test_processes_that_hang_are_ended_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a pipe open, which closes when all have ended."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started_s = time.monotonic()
    loopback_dram(
        f"os.fork()\nfile = os.open({str(fifo)!r}, os.O_WRONLY)\nos.write(file, b'x')\nsignal.pause()",
        4.0,
    )
    assert time.monotonic() - started_s < 120, "they hang for ever"
    assert os.read(reading, 100), "no process ever began"
    ended, _, _ = select.select([reading], [], [], 10)
    assert ended, "a child lives"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_the_processes_keep_the_settings_of_ucx_and_not_those_of_the_engines_telemetry() -> (
    None
):
    code = "pipe.send(Failed(reason=' '.join(f'{k}={v}' for k, v in os.environ.items() if k[:4] in ('UCX_', 'NIXL'))))"
    seen = loopback_dram(
        code, UCX_TLS="tcp", NIXL_TELEMETRY_ENABLE="y", UCX_WARN_UNUSED_ENV_VARS="n"
    ).found
    assert "UCX_TLS=tcp" in seen
    assert "UCX_WARN_UNUSED_ENV_VARS=y" in seen
    assert "NIXL_TELEMETRY" not in seen


def test_gpu_memory_is_tried_where_there_is_a_gpu_and_must_work_there() -> None:
    machine = Machine(dict(os.environ), gpus=("GPU",))
    findings = by_check(
        list(
            check_loopback(
                machine, "cuda", scripted("pipe.send(Failed(reason='no CUDA'))")
            )
        )
    )
    assert findings["loopback"].mark is Mark.BROKEN
    assert "no CUDA" in findings["loopback"].found
    assert (
        list(check_loopback(Machine(dict(os.environ)), "cuda", scripted("pass"))) == []
    )
