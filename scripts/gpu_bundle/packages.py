"""Which packages the bundle carries: those of requirements/cuda.lock that the machine with the GPU lacks.

What is there is used, in whatever version, unless a package that is carried says that it cannot. PyTorch and what comes
with it are never carried: gigabytes, and the reason why such a machine can run the check at all.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from scripts.gpu_bundle.unpack import digest

_WITH_TORCH = re.compile(
    r"torch|torch(vision|audio|codec)|torch-c-dlpack-ext|triton|cuda-\w+|nvidia-(?!ml-py).*"
)
"""Packages that are the machine's, or are done without."""
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "flashinfer-python",
            "humming-kernels",
            "quack-kernels",
            "tilelang",
            "tokenspeed-mla",
            "tokenspeed-triton",
            "z3-solver",
            "ml-dtypes",
            "nvtx",
        ),
        "kernels of other backends than the check's, or what only these need: 1 GB",
    ),
    **dict.fromkeys(("fastsafetensors", "instanttensor"), "other loaders of weights"),
    **dict.fromkeys(
        ("nccl-extensions", "nccl4py"), "for several GPUs, with the machine's NCCL"
    ),
    "pynvvideocodec": "videos",
    "nixl-cu12": "NIXL for CUDA 12; vLLM's wheel is for CUDA 13",
    **dict.fromkeys(
        (
            "agent-detector",
            "detect-installer",
            "fastapi-cli",
            "fastapi-cloud-cli",
            "fastar",
            "rich-toolkit",
            "rignore",
            "sentry-sdk",
        ),
        "FastAPI's own command line",
    ),
}
"""Packages of the lock that vLLM, or what it needs, names and that the check runs without, with the reason."""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)\s*(?:;\s*([^\\]+?))?\s*\\?$")
_NEWEST_GLIBC = 39
"""Wheels for 2.39 and older are taken; `needed_glibc` says what they ask for in the end."""


class PackagesError(Exception):
    """The packages cannot be brought together; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A package in a lock: its version, and the lines with its hashes."""

    name: str
    version: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A downloaded wheel and what it requires."""

    path: Path
    name: str
    version: str
    requires: tuple[Requirement, ...]


def read_lock(text: str, environment: Mapping[str, str]) -> dict[str, Pin]:
    """The packages of a lock for an environment of markers, by name."""
    pins: dict[str, Pin] = {}
    # A pin's hashes are on lines of their own, each continued by the one before.
    for entry in re.sub(r"\\\n", "\\\\\x00", text).splitlines():
        first, *hashes = entry.split("\x00")
        found = _PIN.match(first.strip())
        if found is None:
            continue
        name, version, marker = found.groups()
        if marker and not Marker(marker).evaluate(dict(environment)):
            continue
        key = canonicalize_name(name)
        lines = tuple(line.strip().rstrip("\\").strip() for line in hashes)
        pins[key] = Pin(key, version, lines)
    return pins


def read_present(text: str) -> dict[str, str]:
    """What `pip list --format=freeze` printed: versions by name, empty where none is said.

    Raises:
        PackagesError: a line is something else.
    """
    present: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, _, version = line.partition("==")
        if "@" in name:
            name = name.partition("@")[0]
            version = ""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name.strip()):
            raise PackagesError(
                f"line {number} of the list of packages that are there is {line!r};"
                " expected NAME==VERSION, as `python3 -m pip list --format=freeze` prints it"
            )
        present[canonicalize_name(name.strip())] = version.strip()
    return present


def environment_of(python: str) -> dict[str, str]:
    """What markers are evaluated with: Linux on x86-64 with this Python, such as 3.12."""
    return {
        "extra": "",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def is_with_torch(name: str) -> bool:
    """Whether a package comes with PyTorch and is never carried."""
    return _WITH_TORCH.fullmatch(name) is not None


def lacking(pins: Mapping[str, Pin], present: Mapping[str, str]) -> dict[str, Pin]:
    """What is not there and not left out."""
    return {
        name: pin
        for name, pin in pins.items()
        if name not in present and name not in LEFT_OUT and not is_with_torch(name)
    }


def unmet(
    wheels: Iterable[Wheel], present: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, list[str]]:
    """Packages that wheels require and that neither these nor what is there provide: who asks for what, by name."""
    carried = {wheel.name: wheel for wheel in wheels}
    found: dict[str, list[str]] = {}
    for wheel in carried.values():
        for requirement in wheel.requires:
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate(
                dict(environment)
            ):
                continue
            if is_with_torch(name) or name in LEFT_OUT or name in carried:
                continue
            if name not in present or not _accepts(requirement, present[name]):
                there = f", there is {present[name]}" if name in present else ""
                asked = f"{wheel.name} needs {requirement.name}{requirement.specifier}{there}"
                found.setdefault(name, []).append(asked)
    return found


def _accepts(requirement: Requirement, version: str) -> bool:
    try:
        return not version or requirement.specifier.contains(
            Version(version), prereleases=True
        )
    except InvalidVersion:
        return True  # a build of somebody's own; vLLM will tell


def collect(
    wanted: Mapping[str, Pin],
    pins: Mapping[str, Pin],
    present: Mapping[str, str],
    python: str,
    folder: Path,
) -> list[Wheel]:
    """The wheels that are carried, downloaded to `folder` where they are not yet there.

    Args:
        wanted: these, and of `pins` what they need.

    Raises:
        PackagesError: pip failed, or something is required that the lock does not have.
    """
    environment = environment_of(python)
    carried = dict(wanted)
    while True:
        wheels = download(list(carried.values()), python, folder)
        missing = unmet(wheels, present, environment)
        if not missing:
            return wheels
        unknown = [
            line
            for name in sorted(missing.keys() - pins.keys())
            for line in missing[name]
        ]
        if unknown:
            raise PackagesError(
                "the lock does not have all that its packages need; write it anew (`just lock`):\n"
                + "\n".join(unknown)
            )
        # An older version is there: the lock's is carried and found first.
        carried |= {name: pins[name] for name in missing}


def download(pins: Sequence[Pin], python: str, folder: Path) -> list[Wheel]:
    """These wheels, for this Python on Linux.

    Raises:
        PackagesError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _downloaded(pins, folder)
    # pip asks the index about each, even where it is downloaded already: minutes.
    lacking_here = [pin for pin in pins if pin.name not in found]
    if lacking_here:
        _download(lacking_here, python, folder)
        found = _downloaded(pins, folder)
    return [read_wheel(found[pin.name]) for pin in pins]


def _downloaded(pins: Sequence[Pin], folder: Path) -> dict[str, Path]:
    """Those whose wheel is in `folder`, whole, by name."""
    there: dict[tuple[str, Version], Path] = {}
    for path in folder.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        there[canonicalize_name(name), Version(version)] = path
    found = {}
    for pin in pins:
        wheel = there.get((pin.name, Version(pin.version)))
        if wheel is not None and f"--hash=sha256:{digest(wheel)}" in pin.lines:
            found[pin.name] = wheel
    return found


def _download(pins: Sequence[Pin], python: str, folder: Path) -> None:
    requirements = folder / "requirements.txt"
    text = (f"{pin.name}=={pin.version} {' '.join(pin.lines)}\n" for pin in pins)
    requirements.write_text("".join(text))
    # pip's own choice where none is configured, and its own words where it fails.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    command += [
        *target_options(python),
        "--dest",
        str(folder),
        "--requirement",
        str(requirements),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackagesError(
            f"pip could not download the wheels for Python {python} (pip's configuration says from where):\n"
            + "\n".join(
                line for line in done.stderr.splitlines() if "WARNING" not in line
            )[-3000:]
        )


def target_options(python: str) -> list[str]:
    """pip's options for wheels of another Python than the one that runs it."""
    tag = f"cp{python.replace('.', '')}"
    options = ["--python-version", python, "--implementation", "cp"]
    for abi in (tag, "abi3", "none"):
        options += ["--abi", abi]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, _NEWEST_GLIBC + 1)]
    for each in ("1", "2010", "2014"):
        platforms.append(f"manylinux{each}_x86_64")
    for platform in [*platforms, "linux_x86_64"]:
        options += ["--platform", platform]
    return options


def needed_glibc(names: Iterable[str]) -> int:
    """The oldest glibc that all wheels of these names run on: 28 for 2.28."""
    newest = 5
    for name in names:
        fit = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_x86_64", name)]
        if fit and "manylinux1_" not in name and "manylinux20" not in name:
            newest = max(newest, min(fit))
    return newest


def read_wheel(path: Path) -> Wheel:
    """A wheel's name and requirements. What cannot be read as a requirement is left to whoever imports it."""
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (
            name
            for name in archive.namelist()
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    requires = tuple(_requirements(headers.get_all("Requires-Dist") or ()))
    return Wheel(path, canonicalize_name(headers["Name"]), headers["Version"], requires)


def _requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    for line in lines:
        try:
            yield Requirement(line)
        except InvalidRequirement:
            continue


def unzip(
    wheel: Path, folder: Path, wanted: Callable[[str], bool] = lambda _name: True
) -> None:
    """Put a wheel's modules into `folder`, as an installation does; its programs and data are left.

    Raises:
        PackagesError: it has a file outside itself.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = Path(member.filename).parts
            if not parts or member.is_dir() or not wanted(member.filename):
                continue
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            if ".." in parts or Path(member.filename).is_absolute():
                raise PackagesError(
                    f"{wheel.name} has a file outside itself: {member.filename}"
                )
            target = folder.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            if member.external_attr >> 16 & 0o111:
                target.chmod(0o755)
