"""The files requirements/*.lock: exact versions, with the hashes of every file that may be installed for them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PIN = re.compile(r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[0-9][a-z0-9.]*)(?P<hashes>(?: --hash=\S+)+)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
_INPUTS = re.compile(r"^# inputs: (\w+)$", re.MULTILINE)


class LockError(ValueError):
    """A lock file cannot be used; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package.

    Attributes:
        hashes: `sha256:…` of each file that may be installed, sorted; none of them twice.
    """

    name: str
    version: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" + "".join(f" \\\n    --hash={one}" for one in self.hashes) + "\n"


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file.

    Attributes:
        reported: what its head says, without `#`.
        inputs: `inputs_digest` of what it was made from.
    """

    reported: tuple[str, ...]
    inputs: str
    pins: tuple[Pin, ...]

    def __str__(self) -> str:
        head = "".join(f"# {line}\n" for line in self.reported)
        return f"{head}# inputs: {self.inputs}\n" + "".join(str(pin) for pin in self.pins)

    @property
    def versions(self) -> dict[str, str]:
        """Canonical name → version."""
        return {pin.name: pin.version for pin in self.pins}


def read_lock(path: Path) -> Lock:
    """Read a lock.

    Raises:
        LockError: a line is no exact version with its hashes, a package is there twice, or they are not sorted.
    """
    text = path.read_text()
    found = _INPUTS.search(text)
    if found is None:
        raise LockError(f"{path.name}: no line '# inputs: …'")
    head = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = tuple(_pin(path.name, line) for line in "\n".join(lines).replace("\\\n    ", "").splitlines())
    names = [pin.name for pin in pins]
    if names != sorted(set(names)):
        raise LockError(f"{path.name}: names must be sorted, and each there once")
    return Lock(tuple(head[:-1]), found[1], pins)


def _pin(file: str, line: str) -> Pin:
    found = _PIN.fullmatch(line)
    hashes = tuple(_HASH.findall(line))
    if found is None or not hashes or len(hashes) != line.count("--hash="):
        raise LockError(f"{file}: expected name==version and --hash=sha256:… of each of its files, found {line!r}")
    return Pin(found["name"], found["version"], hashes)


def direct_requirements(path: Path) -> list[Requirement]:
    """The lines of a requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def exact_versions(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name → version of those that are pinned with `==`."""
    found: dict[str, str] = {}
    for requirement in requirements:
        specifiers = list(requirement.specifier)
        if len(specifiers) == 1 and specifiers[0].operator == "==":
            found[canonicalize_name(requirement.name)] = specifiers[0].version
    return found


def inputs_digest(requirements: Sequence[Requirement]) -> str:
    """A short hash of requirements, whatever their order and the comments around them."""
    return hashlib.sha256("\n".join(sorted(map(str, requirements))).encode()).hexdigest()[:16]
