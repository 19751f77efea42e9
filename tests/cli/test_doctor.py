"""`kvferry doctor` itself, on this machine, and on invented findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.cli.doctor import command as doctor_command
from kvferry.cli.doctor.command import CHECKS, examine
from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, Mark, broken, look, not_done, ok
from tests.cli.command import run
from tests.packaging.outside import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
LONG_TIMEOUTS = ("--timeout", "120")
FINDINGS = (ok("well", "a"), look("slow", "hurry", "b"), not_done("no kernel", "d"))


def findings(out: str) -> dict[str, dict[str, str]]:
    return {one["check"]: one for one in json.loads(out)["findings"]}


def test_on_this_machine_nixl_moves_every_byte_and_the_transports_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICE", "lo")
    ran = run("doctor", "--json", *LONG_TIMEOUTS)
    found = findings(ran.out)
    assert found["loopback DRAM"]["mark"] in ("ok", "look"), found["loopback DRAM"]
    assert "over " in found["loopback DRAM"]["found"]
    assert "did not name" not in found["loopback DRAM"]["found"]
    assert "UCX_NET_DEVICE (maybe: UCX_NET_DEVICES?)" in found["UCX names"]["found"]
    assert "UCX 1." in found["NIXL library"]["found"]
    assert ran.code == int("broken" in {one["mark"] for one in found.values()})
    assert {
        "python",
        "torch",
        "GPUs",
        "NICs",
        "open files",
        "secret",
        "side channel",
    } <= set(found)


def test_transports_without_an_agent_are_found_twice_and_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By reading the settings, and by the loopback transfer."""
    monkeypatch.setenv("UCX_TLS", "sm,self")
    monkeypatch.setenv("UCX_MM_ERROR_HANDLING", "n")
    ran = run("doctor", "--json", *LONG_TIMEOUTS)
    found = findings(ran.out)
    assert ran.code == 1
    assert found["UCX settings"]["mark"] == "broken"
    assert found["loopback DRAM"]["mark"] == "broken"
    assert "no active messages transport" in found["loopback DRAM"]["found"]


def test_without_any_package_it_names_the_missing_ones() -> None:
    """No site-packages: no msgspec, numpy, zmq, rich, torch, NIXL, vLLM, and no traceback."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / package) for package in PACKAGES)
    # The Python that made this environment has none of its packages, and neither have its children.
    python = (
        Path(sys.base_prefix)
        / "bin"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    command = [str(python), "-S", "-m", "kvferry", "doctor", "--json"]
    ran = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    found = findings(ran.stdout)
    for name in ("nixl", "torch", "msgspec", "pyzmq", "numpy"):
        assert (found[name]["mark"], found[name]["found"]) == (
            "broken",
            "not installed",
        )
        package = "kvferry[worker]'" if name in ("nixl", "torch") else f"{name}>="
        assert found[name]["do"].startswith(f"pip install '{package}")
    assert found["vllm"]["mark"] == "look"
    assert found["UCX settings"]["mark"] == "ok"
    assert found["loopback DRAM"]["mark"] == "not done"


@pytest.mark.parametrize(
    ("more", "code"),
    [((), 0), ((broken("gone", "mend", "c"),), 1)],
    ids=["nothing broken", "something broken"],
)
def test_only_broken_findings_decide_the_exit_status(
    more: tuple[Finding, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "examine", lambda *_: (*FINDINGS, *more))
    assert run("doctor").code == code
    ran = run("doctor", "--json")
    assert ran.code == code
    assert json.loads(ran.out) == {
        "kvferry_doctor": 1,
        "broken": bool(more),
        "findings": [
            {
                "check": one.check,
                "mark": one.mark.value,
                "found": one.found,
                "do": one.do,
            }
            for one in (*FINDINGS, *more)
        ],
    }


def test_a_check_that_fails_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Machine) -> None:
        raise PermissionError("no /proc here")

    def stop(_: Machine) -> None:
        raise KeyboardInterrupt

    for name in ("locked memory", "open files", "versions", "loopback DRAM"):
        monkeypatch.setitem(CHECKS, name, fail)
    found = {one.check: one for one in examine(Machine())}
    for name in ("locked memory", "open files", "versions", "loopback DRAM"):
        assert (found[name].mark, found[name].found) == (
            Mark.NOT_DONE,
            "PermissionError: no /proc here",
        )
    assert found["processors"].mark is not Mark.NOT_DONE
    monkeypatch.setitem(CHECKS, "processors", stop)
    with pytest.raises(KeyboardInterrupt):
        list(examine(Machine()))


def test_a_check_that_hangs_costs_itself_only_and_the_doctor_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All checks run at the same time: two that hang cost the time of one."""
    both_began = threading.Barrier(2)
    held = threading.Event()
    hanging: list[Machine] = []

    def hang(machine: Machine) -> tuple[()]:
        both_began.wait()
        hanging.append(machine)
        held.wait()
        return ()

    for name in ("huge pages", "side channel"):
        monkeypatch.setitem(CHECKS, name, hang)
    for name in ("loopback DRAM", "loopback VRAM"):
        monkeypatch.setitem(CHECKS, name, lambda _: ())
    shown: list[str] = []
    found = {one.check: one for one in examine(Machine(timeout_s=4.0), shown.append)}
    assert len(hanging) == 2, "one waits for the other to end"
    held.set()
    assert (found["huge pages"].mark, found["huge pages"].found) == (
        Mark.NOT_DONE,
        "did not end within 4 s",
    )
    assert found["side channel"].mark is Mark.NOT_DONE
    assert found["secret"].mark is not Mark.NOT_DONE
    assert shown[-1] == "huge pages, side channel"
