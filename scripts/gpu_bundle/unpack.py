"""On the machine with the GPU: takes the deliveries in, unpacks them when all are there, makes an environment of them.

    python3 unpack.py BUNDLE HOME

BUNDLE is the folder that this file was delivered in, HOME a folder that stays between deliveries. Every piece is
compared with its SHA-256 before it is used. Standard library only. Exit status: 0 all is ready, 3 deliveries are
missing, 2 it cannot be used here; what is said tells what to do.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import site
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

READY = 0
UNUSABLE = 2
INCOMPLETE = 3
_SCHEMA = 1
_LAUNCHERS = {
    "kvferry": "kvferry.cli.main:main",
    "vllm-router": "vllm_router.launch_router:main",
}
"""Programs that the check starts, with what their packages' entry points name."""


class Unusable(Exception):
    """The bundle cannot be used here; the text says what to do."""


class Incomplete(Exception):
    """Deliveries are missing; the text names them."""


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {text}", flush=True)

    try:
        bundle, home = (Path(word).resolve() for word in arguments)
    except ValueError:
        print("expected two folders: unpack.py BUNDLE HOME", file=sys.stderr)
        return UNUSABLE
    try:
        manifest = read_manifest(bundle)
        check_here(manifest)
        receive(bundle, home, manifest, say)
        if unpack(home, manifest, say):
            make_environment(home)
            say("the environment is ready")
    except Incomplete as missing:
        say(str(missing))
        return INCOMPLETE
    except Unusable as error:
        print(f"cannot be used: {error}", file=sys.stderr)
        return UNUSABLE
    except OSError as error:
        print(
            f"cannot be used: {error}; look at the space and the rights there",
            file=sys.stderr,
        )
        return UNUSABLE
    return READY


def read_manifest(bundle: Path) -> dict[str, Any]:
    """What the bundle consists of.

    Raises:
        Unusable: it is not there, or of another version.
    """
    path = bundle / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        schema = manifest["kvferry_gpu_bundle"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(
            f"{path} is not a bundle's manifest ({error}); deliver it, run.sh and unpack.py with every folder"
        ) from error
    if schema != _SCHEMA:
        raise Unusable(
            f"{path} has schema {schema}, unpack.py knows {_SCHEMA}; deliver both anew"
        )
    return manifest


def check_here(manifest: dict[str, Any]) -> None:
    """Whether this Python and this system can use it.

    Raises:
        Unusable: they cannot.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    if python != manifest["python"]:
        raise Unusable(
            f"it was built for Python {manifest['python']}, this is {python} ({sys.executable});"
            f" set PYTHON to another, or build with --python {python}"
        )
    libc, version = platform.libc_ver()
    needed = manifest["glibc"]
    if libc == "glibc" and int(version.split(".")[1]) < needed:
        raise Unusable(f"its wheels need glibc 2.{needed}, this is {version}")
    if find_spec("torch") is None:
        raise Unusable(
            f"{sys.executable} has no torch; set PYTHON to the Python that has it, built for CUDA"
        )


def receive(
    bundle: Path, home: Path, manifest: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Take in the pieces that were delivered, and keep them.

    Raises:
        Unusable: a piece is damaged.
        Incomplete: some have not been delivered.
    """
    missing = set()
    taken = 0
    for archive in manifest["archives"]:
        for piece in archive["pieces"]:
            kept = home / "pieces" / piece["file"]
            if kept.is_file() and digest(kept) == piece["sha256"]:
                continue
            delivered = bundle / piece["file"]
            if not delivered.is_file():
                missing.add(piece["file"].partition("/")[0])
                continue
            found = digest(delivered)
            if found != piece["sha256"]:
                size = delivered.stat().st_size
                raise Unusable(
                    f"{delivered} is damaged: {size} bytes of {piece['bytes']}, SHA-256 {found[:16]}…,"
                    f" expected {piece['sha256'][:16]}…; deliver folder {delivered.parent.name} again"
                )
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial = kept.with_name(f"{kept.name}.partial")
            shutil.copyfile(delivered, partial)
            os.replace(partial, kept)
            taken += 1
    if taken:
        say(f"took in {taken} pieces, SHA-256 as expected")
    if missing:
        names = ", ".join(sorted(missing, key=int))
        raise Incomplete(
            f"not delivered yet: folder {names}; deliver it and run this again"
        )


def unpack(home: Path, manifest: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Unpack the pieces, unless this bundle is unpacked already. Returns whether it was done.

    Raises:
        Unusable: there is not room enough.
    """
    stamp = home / "unpacked.sha256"
    key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == key:
        return False
    stamp.unlink(missing_ok=True)
    root = home / "bundle"
    shutil.rmtree(root, ignore_errors=True)
    needed = sum(archive["unpacked_bytes"] for archive in manifest["archives"])
    free = shutil.disk_usage(home).free
    if free < needed:
        raise Unusable(
            f"{home} has {free >> 20} MiB free, {needed >> 20} are needed; set KVFERRY_BUNDLE_HOME to another folder"
        )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        # The largest first: xz uses one core an archive.
        archives = sorted(manifest["archives"], key=lambda one: -one["unpacked_bytes"])
        running = {
            threads.submit(_extract, home / "pieces", one, root / one["into"]): one
            for one in archives
        }
        for done in as_completed(running):
            done.result()
            one = running[done]
            say(f"unpacked {one['name']}, {one['unpacked_bytes'] >> 20} MiB")
    stamp.write_text(key)
    return True


def _extract(pieces: Path, archive: dict[str, Any], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    paths = [pieces / piece["file"] for piece in archive["pieces"]]
    with (
        io.BufferedReader(_Joined(paths)) as joined,
        lzma.open(joined) as plain,
        tarfile.open(fileobj=plain, mode="r|") as members,
    ):
        if hasattr(tarfile, "data_filter"):
            members.extractall(target, filter="data")
        else:
            members.extractall(target)  # noqa: S202 - its pieces were compared with their digests


class _Joined(io.RawIOBase):
    """Files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._files:
            count = self._files[0].readinto(buffer)
            if count:
                return count
            self._files.pop(0).close()
        return 0

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


def make_environment(home: Path) -> None:
    """An environment `home/env`: what was carried first, then what this Python has.

    The check looks for programs beside its Python, where nothing may be written on this machine.

    Raises:
        Unusable: this Python has no module venv.
    """
    environment = home / "env"
    command = [
        sys.executable,
        "-m",
        "venv",
        "--clear",
        "--without-pip",
        str(environment),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(
            f"{' '.join(command)} failed: {done.stdout}{done.stderr}".strip()
        )
    (packages,) = environment.glob("lib/python*/site-packages")
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # Not --system-site-packages: of a Python that is in an environment itself, those are not its own packages.
    lines = [str(home / "bundle" / "site")]
    lines += [f"import site; site.addsitedir({folder!r})" for folder in folders]
    (packages / "kvferry_gpu_bundle.pth").write_text("\n".join([*lines, ""]))
    for name, target in _LAUNCHERS.items():
        module, _, function = target.partition(":")
        program = environment / "bin" / name
        program.write_text(
            f"#!{environment / 'bin' / 'python'}\nimport sys\n"
            f"from {module} import {function}\n\nsys.exit({function}())\n"
        )
        program.chmod(0o755)


def digest(path: Path) -> str:
    """A file's SHA-256."""
    read = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            read.update(chunk)
    return read.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
