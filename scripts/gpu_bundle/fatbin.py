"""Takes the device code out of a shared library that given GPUs cannot use.

    python -m scripts.gpu_bundle.fatbin FILE…       lists what the libraries have

A library for CUDA holds *fat binaries*, each with the same kernels for several architectures:

    offset  size  fat binary              offset  size  image
    0       4     50 ed 55 ba             0       2     1 PTX, 2 machine code (ELF)
    4       2     version, 1              4       4     size of its header
    6       2     size of the header, 16  8       8     size of what follows its header
    8       8     size of the images      28      4     architecture: 90 is sm_90 and sm_90a

NVIDIA does not document this. It was read off vLLM's and torch's libraries; what does not look so is refused.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<4sHHQ")
PTX = 1
ELF = 2
_VERSION = 1
_IMAGE = struct.Struct("<HHIQ")
_ARCHITECTURE = struct.Struct("<I")
_ARCHITECTURE_AT = 28
_SMALLEST_IMAGE_HEADER = 64


class NotUnderstood(Exception):
    """A fat binary is not built as this module knows it; the text says where."""


@dataclass(frozen=True, slots=True)
class Image:
    """Device code for one architecture: bytes `[start, end)` of the library, its header among them."""

    start: int
    end: int
    kind: int
    sm: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FatBinary:
    """Its header begins at `start`; the images fill `[start + 16, end)`."""

    start: int
    end: int
    images: tuple[Image, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """A library after pruning.

    Attributes:
        before, after: bytes of device code.
        ptx: those of `after` that a driver has to compile.
        useless: fat binaries with nothing for the GPUs.
    """

    library: bytes
    before: int
    after: int
    ptx: int
    useless: int


def fat_binaries(library: bytes) -> Iterator[FatBinary]:
    """All of a library.

    Raises:
        NotUnderstood: the images of one do not fill it.
    """
    at = library.find(MAGIC)
    while at >= 0:
        if at + HEADER.size > len(library):
            return
        _, version, header_size, size = HEADER.unpack_from(library, at)
        end = at + header_size + size
        if version != _VERSION or header_size != HEADER.size or end > len(library):
            # The wrapper of a fat binary and code that handles them have these four bytes too.
            at = library.find(MAGIC, at + 4)
            continue
        yield FatBinary(at, end, tuple(_images(library, at + header_size, end)))
        at = library.find(MAGIC, end)


def _images(library: bytes, start: int, end: int) -> Iterator[Image]:
    at = start
    # What is shorter than a header is padding.
    while at + _SMALLEST_IMAGE_HEADER <= end:
        kind, _, header_size, size = _IMAGE.unpack_from(library, at)
        image_end = at + header_size + size
        if (
            kind not in (PTX, ELF)
            or header_size < _SMALLEST_IMAGE_HEADER
            or image_end > end
        ):
            raise NotUnderstood(
                f"at byte {at} is no image of device code: kind {kind}, header of {header_size} bytes, {size} bytes"
            )
        (sm,) = _ARCHITECTURE.unpack_from(library, at + _ARCHITECTURE_AT)
        yield Image(at, image_end, kind, sm)
        at = image_end


def usable(images: Sequence[Image], sm: int) -> list[Image]:
    """What a GPU of this architecture runs: its own machine code, else the newest of an older one with the same first
    digit, else the newest PTX that is not newer than the GPU."""
    codes = [image for image in images if image.kind == ELF]
    same_family = [
        image.sm for image in codes if image.sm // 10 == sm // 10 and image.sm <= sm
    ]
    if same_family:
        # sm_90 and sm_90a have the same number, and a kernel may need either.
        return [image for image in codes if image.sm == max(same_family)]
    sources = [image for image in images if image.kind == PTX and image.sm <= sm]
    if not sources:
        return []
    return [max(sources, key=lambda image: image.sm)]


def prune(library: bytes, architectures: Collection[int]) -> Pruned:
    """Leave what these architectures use.

    Nothing moves but device code within its fat binary: addresses in the library stay, and the zeros that replace
    what was taken out compress to nothing.
    """
    pruned = bytearray(library)
    before = 0
    after = 0
    ptx = 0
    useless = 0
    for binary in fat_binaries(library):
        wanted = {image for sm in architectures for image in usable(binary.images, sm)}
        if binary.images and not wanted:
            useless += 1
            # CUDA refuses an empty fat binary when the library is loaded, a foreign one only at a launch.
            wanted = {min(binary.images, key=lambda image: image.size)}
        kept = [image for image in binary.images if image in wanted]
        code = b"".join(library[image.start : image.end] for image in kept)
        first = binary.start + HEADER.size
        HEADER.pack_into(pruned, binary.start, MAGIC, _VERSION, HEADER.size, len(code))
        pruned[first : binary.end] = code.ljust(binary.end - first, b"\0")
        before += binary.end - first
        after += len(code)
        ptx += sum(image.size for image in kept if image.kind == PTX)
    return Pruned(bytes(pruned), before, after, ptx, useless)


def main(files: Sequence[str]) -> None:
    """List the architectures in libraries."""
    for file in files:
        images: Counter[tuple[int, int]] = Counter()
        sizes: Counter[tuple[int, int]] = Counter()
        for binary in fat_binaries(Path(file).read_bytes()):
            for image in binary.images:
                images[image.sm, image.kind] += 1
                sizes[image.sm, image.kind] += image.size
        print(file)
        for sm, kind in sorted(images):
            name = "PTX" if kind == PTX else "machine code"
            count = images[sm, kind]
            print(
                f"  sm_{sm} {name}: {count} images, {sizes[sm, kind] / 2**20:.1f} MiB"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
