"""Archives, cut into pieces that fill folders of a limited size, and the manifest that names them all.

DEST/run.sh, unpack.py, manifest.json     a few KiB, delivered with every folder
DEST/1/vllm.tar.xz.0 …                    a folder of pieces: one delivery
DEST/2/vllm.tar.xz.1, packages.tar.xz.0 …
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SMALLEST_LIMIT = MIB
"""Below it the deliveries would be too many to be carried one by one."""
COMMON = ("run.sh", "unpack.py")
MANIFEST = "manifest.json"
SCHEMA = 1
_FOR_MANIFEST = 64 << 10
_CHUNK = MIB


class BadLimit(ValueError):
    """A limit below the smallest one."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A packed folder.

    Attributes:
        into: where its files belong, from the folder that the bundle is unpacked to.
        unpacked: bytes of its files.
    """

    path: Path
    into: str
    unpacked: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of a delivery: bytes of an archive, the next ones after the piece before it."""

    file: str
    bytes: int
    sha256: str


def pack(folder: Path, target: Path, preset: int = 6) -> int:
    """Pack a folder into `target`, a .tar.xz that is the same whenever its files are. Returns the files' bytes."""
    partial = target.with_suffix(".partial")
    unpacked = 0
    with (
        lzma.open(partial, "wb", preset=preset) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            member = archive.gettarinfo(str(path), str(path.relative_to(folder)))
            member.uid = 0
            member.gid = 0
            member.uname = ""
            member.gname = ""
            member.mtime = 0
            unpacked += member.size
            if member.isreg():
                with path.open("rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
    os.replace(partial, target)
    return unpacked


def write_bundle(
    archives: Sequence[Archive],
    destination: Path,
    limit_bytes: int,
    common: Path,
    about: dict[str, Any],
) -> list[int]:
    """Cut the archives into deliveries and write these, the manifest and what runs them to `destination`.

    Args:
        limit_bytes: of one delivery, with the files that all have.
        common: the folder of `COMMON`.
        about: more of the manifest.

    Returns:
        The bytes of each delivery.

    Raises:
        BadLimit: `limit_bytes` is below `SMALLEST_LIMIT`.
    """
    if limit_bytes < SMALLEST_LIMIT:
        raise BadLimit(
            f"{limit_bytes} bytes a delivery are too few; at least {SMALLEST_LIMIT} are needed"
        )
    destination.mkdir(parents=True, exist_ok=True)
    for old in destination.glob("[0-9]*"):
        shutil.rmtree(old)
    for name in COMMON:
        shutil.copy(common / name, destination / name)
    shared = sum((destination / name).stat().st_size for name in COMMON) + _FOR_MANIFEST
    room = limit_bytes - shared
    cutter = _Cutter(destination, room)
    listed = []
    for archive in archives:
        pieces = cutter.cut(archive.path)
        listed.append(
            {
                "name": archive.path.name,
                "into": archive.into,
                "unpacked_bytes": archive.unpacked,
                "pieces": [asdict(piece) for piece in pieces],
            }
        )
    manifest = {"kvferry_gpu_bundle": SCHEMA, **about, "archives": listed}
    (destination / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return [used + shared for used in cutter.used]


class _Cutter:
    """Fills one delivery after the other."""

    def __init__(self, destination: Path, room: int) -> None:
        self._destination = destination
        self._room = room
        self.used: list[int] = []

    def cut(self, archive: Path) -> list[Piece]:
        """The pieces of an archive, written."""
        pieces: list[Piece] = []
        left = archive.stat().st_size
        with archive.open("rb") as source:
            while left:
                if not self.used or self.used[-1] == self._room:
                    self.used.append(0)
                size = min(left, self._room - self.used[-1])
                name = f"{len(self.used)}/{archive.name}.{len(pieces)}"
                target = self._destination / name
                target.parent.mkdir(exist_ok=True)
                digest = hashlib.sha256()
                with target.open("wb") as piece:
                    rest = size
                    while rest:
                        chunk = source.read(min(rest, _CHUNK))
                        digest.update(chunk)
                        piece.write(chunk)
                        rest -= len(chunk)
                pieces.append(Piece(name, size, digest.hexdigest()))
                self.used[-1] += size
                left -= size
        return pieces
