"""`UCX_*` variables that cause hangs, leaks or slow transfers, on invented machines."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor.devices import Machine, Port
from kvferry.cli.doctor.findings import Finding, Mark
from kvferry.cli.doctor.ucx import check_ucx, seconds

PLAIN = Machine(interfaces=("eth0", "lo"))
GPUS = dataclasses.replace(PLAIN, gpus=("GPU",))
UP = (Port("mlx5_0:1", state="ACTIVE"), Port("mlx5_1:1", state="ACTIVE"))
NICS = Machine(ports=UP, interfaces=("eth0",))
ONE_DOWN = dataclasses.replace(NICS, ports=(*UP, Port("mlx5_2:1", state="DOWN")))
ONLY_SHARED = {"UCX_TLS": "^tcp", "UCX_MM_ERROR_HANDLING": "y"}
BOUNDED = {"UCX_RCACHE_MAX_UNRELEASED": "1024"}


def check(environ: dict[str, str], machine: Machine) -> list[Finding]:
    findings = list(check_ucx(dataclasses.replace(machine, environ=environ)))
    assert findings
    assert all(one.found and (one.do or one.mark is Mark.OK) for one in findings)
    return findings


def troubles(environ: dict[str, str], machine: Machine = PLAIN) -> list[tuple[Mark, str]]:
    return [(one.mark, one.found) for one in check(environ, machine) if one.mark is not Mark.OK]


@pytest.mark.parametrize(
    ("environ", "machine"),
    [
        ({}, PLAIN),
        ({}, GPUS),
        ({"UCX_MM_ERROR_HANDLING": "n"}, PLAIN),
        ({"UCX_TLS": "^tcp", "UCX_MM_ERROR_HANDLING": "y"}, PLAIN),
        ({"UCX_KEEPALIVE_INTERVAL": "inf"}, PLAIN),
        ({"UCX_TLS": "^tcp"}, GPUS),
        ({"UCX_TLS": "rc,cuda"}, GPUS),
        ({"UCX_TLS": "rc_x,sm,self"}, PLAIN),
        ({"UCX_NET_DEVICES": "eth0"}, PLAIN),
        ({"UCX_NET_DEVICES": "^docker0"}, PLAIN),
        ({"UCX_RC_TIMEOUT": "2s", "UCX_RC_RETRY_COUNT": "7"}, PLAIN),
        (BOUNDED, NICS),
        ({**BOUNDED, "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1"}, ONE_DOWN),
        ({**BOUNDED, "UCX_NET_DEVICES": "mlx5_[0-1]:1"}, ONE_DOWN),
        ({"UCX_LOG_LEVEL": "info"}, PLAIN),
    ],
)
def test_good_settings_are_not_reported(environ: dict[str, str], machine: Machine) -> None:
    assert troubles(environ, machine) == []


@pytest.mark.parametrize(
    ("environ", "machine", "mark", "said"),
    [
        ({"UCX_TLS": "cma"}, PLAIN, Mark.BROKEN, "no transport for messages"),
        ({"UCX_TLS": "cuda_copy,cuda_ipc"}, GPUS, Mark.BROKEN, "no transport for messages"),
        (
            {"UCX_TLS": "sm,self", "UCX_MM_ERROR_HANDLING": "n"},
            PLAIN,
            Mark.BROKEN,
            "cannot make an agent",
        ),
        ({"UCX_TLS": "sm,self"}, PLAIN, Mark.LOOK, "this host only"),
        ({"UCX_TLS": "rc,self"}, GPUS, Mark.BROKEN, "no transport for GPU memory"),
        ({"UCX_TLS": "rc,cuda_copy"}, GPUS, Mark.LOOK, "no cuda_ipc"),
        (
            {"UCX_NET_DEVICES": "mlx5_0:1,eth0"},
            PLAIN,
            Mark.BROKEN,
            "names mlx5_0:1, not on this machine",
        ),
        ({"UCX_NET_DEVICES": "mlx5_2:1", **BOUNDED}, ONE_DOWN, Mark.BROKEN, "is down"),
        (BOUNDED, ONE_DOWN, Mark.LOOK, "not every NIC port is up"),
        (
            {"UCX_KEEPALIVE_INTERVAL": "inf", **ONLY_SHARED},
            PLAIN,
            Mark.LOOK,
            "dead peer may never end",
        ),
        ({"UCX_KEEPALIVE_INTERVAL": "20s", **ONLY_SHARED}, PLAIN, Mark.LOOK, "core spin"),
        ({"UCX_RC_TIMEOUT": "3s"}, PLAIN, Mark.LOOK, "for 84 s"),
        ({"UCX_RC_RETRY_COUNT": "15"}, PLAIN, Mark.LOOK, "for 60 s"),
        ({"UCX_MM_ERROR_HANDLING": "y"}, PLAIN, Mark.LOOK, "killed in mid-message"),
        (
            {"UCX_TLS": "tcp,sm", "UCX_MM_ERROR_HANDLING": "y"},
            PLAIN,
            Mark.LOOK,
            "killed in mid-message",
        ),
        ({}, NICS, Mark.LOOK, "seen to leak"),
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}, GPUS, Mark.LOOK, "between GPUs"),
        ({"UCX_LOG_LEVEL": "debug"}, PLAIN, Mark.LOOK, "slows"),
    ],
)
def test_settings_known_to_hang_leak_or_slow_are_reported(
    environ: dict[str, str], machine: Machine, mark: Mark, said: str
) -> None:
    ((found_mark, found),) = troubles(environ, machine)
    assert found_mark is mark
    assert said in found


def test_settings_added_by_kvferry_are_judged_and_shown_apart_from_the_users() -> None:
    (finding,) = check({"UCX_TLS": "tcp", "HOME": "/"}, PLAIN)
    assert finding.mark is Mark.OK
    assert (
        finding.found
        == "UCX_TLS=tcp; kvferry adds UCX_TCP_RX_SEG_SIZE=256k UCX_TCP_TX_SEG_SIZE=256k"
    )
    (finding,) = check({"UCX_TLS": "rc"}, PLAIN)
    assert finding.found == "UCX_TLS=rc; kvferry adds none"


_VALUES = st.text(st.sampled_from("rcstmpuda_,^:0123456789 inf\\"), max_size=12)
_NAMES = st.sampled_from(
    [
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "UCX_KEEPALIVE_INTERVAL",
        "UCX_RC_TIMEOUT",
        "UCX_RC_RETRY_COUNT",
        "UCX_LOG_LEVEL",
    ]
)


@given(st.dictionaries(_NAMES, _VALUES), st.sampled_from([PLAIN, GPUS, NICS, ONE_DOWN]))
def test_no_value_is_too_strange_to_be_judged(environ: dict[str, str], machine: Machine) -> None:
    check(environ, machine)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20s", 20.0),
        ("500ms", 0.5),
        ("1000000.00us", 1.0),
        ("2m", 120.0),
        ("3", 3.0),
        ("inf", math.inf),
        ("x", None),
    ],
)
def test_times_are_read_as_ucx_reads_them(text: str, value: float | None) -> None:
    assert seconds(text) == value
