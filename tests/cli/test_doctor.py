"""`kvferry doctor` itself, on this machine, and on invented findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from kvferry.cli.doctor import command as doctor_command
from kvferry.cli.doctor.command import CHECKS, examine
from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, not_done, ok
from tests.cli.command import run
from tests.packaging.outside import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
LONG_TIMEOUTS = ("--timeout", "120")


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
    assert {"python", "torch", "GPUs", "NICs", "open files", "secret"} <= set(found)


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
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    command = [f"{sys.base_prefix}/bin/{python}", "-S", "-m", "kvferry", "doctor"]
    ran = subprocess.run(
        [*command, "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    found = findings(ran.stdout)
    for name in ("nixl", "torch", "msgspec", "pyzmq", "numpy"):
        missing = ("broken", "not installed")
        assert (found[name]["mark"], found[name]["found"]) == missing
        package = "kvferry[worker]'" if name in ("nixl", "torch") else f"{name}>="
        assert found[name]["do"].startswith(f"pip install '{package}")
    assert found["vllm"]["mark"] == "look"
    assert found["UCX settings"]["mark"] == "ok"
    assert found["loopback DRAM"]["mark"] == "not done"


@pytest.mark.parametrize("is_broken", [False, True])
def test_only_broken_findings_decide_the_exit_status(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    invented = [ok("well", "a"), look("slow", "hurry", "b"), not_done("none", "d")]
    if is_broken:
        invented.append(broken("gone", "mend", "c"))
    monkeypatch.setattr(doctor_command, "examine", lambda *_: invented)
    assert run("doctor").code == is_broken
    ran = run("doctor", "--json")
    assert ran.code == is_broken
    assert json.loads(ran.out) == {
        "kvferry_doctor": 1,
        "broken": is_broken,
        "findings": [asdict(one) for one in invented],
    }
    assert list(findings(ran.out)["b"]) == ["check", "mark", "found", "do"]


def test_checks_that_fail_or_hang_cost_themselves_only_and_it_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All checks run at the same time: two that hang cost the time of one."""
    both_began = threading.Barrier(2)
    held = threading.Event()

    def hang(machine: Machine) -> tuple[Finding, ...]:
        both_began.wait()
        held.wait()
        return ()

    def fail(_: Machine) -> tuple[Finding, ...]:
        raise PermissionError("no /proc here")

    for name in ("huge pages", "side channel"):
        monkeypatch.setitem(CHECKS, name, hang)
    for name in ("locked memory", "versions"):
        monkeypatch.setitem(CHECKS, name, fail)
    for name in ("EFA", "loopback DRAM", "loopback VRAM"):
        monkeypatch.setitem(CHECKS, name, lambda _: ())
    shown: list[str] = []
    found = {one.check: one for one in examine(Machine(timeout_s=4.0), shown.append)}
    held.set()
    assert both_began.n_waiting == 0, "one waits for the other to end"
    for name in ("huge pages", "side channel"):
        assert found[name] == not_done("did not end within 4 s", name)
    for name in ("locked memory", "versions"):
        assert found[name] == not_done("PermissionError: no /proc here", name)
    assert found["secret"].mark != "not done"
    assert shown[-1] == "kvferry doctor waits for huge pages, side channel"
