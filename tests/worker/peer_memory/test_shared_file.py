"""Memory files that another process maps: what it sees, what a handle may not be, and what is left of them."""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.protocol.handshake import SharedAllocation
from kvferry.worker.peer_memory.port import PROOF_BYTES, NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile, map_shared
from tests.open_files import open_files

SIZE = 10_000
SEAL_SHRINK = fcntl.F_SEAL_SHRINK
READER = """
import sys
import msgspec
from kvferry.protocol.handshake import SharedAllocation
from kvferry.worker.peer_memory.shared_file import map_shared

pid, allocation = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=SharedAllocation)
mapped = map_shared(pid, allocation)
print(int(mapped[0]), flush=True)
sys.stdin.readline()
print(int(mapped[0]), mapped.flags.writeable, bytes(mapped[-16:]).hex(), flush=True)
"""


def maps_of(name: str) -> int:
    """How often a file is mapped in this process."""
    return Path("/proc/self/maps").read_text().count(name)


def test_another_process_sees_what_is_written_and_cannot_write() -> None:
    file = SharedFile(SIZE)
    file.tensor[0] = 7
    described = msgspec.json.encode(file.allocation).decode()
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(os.getpid()), described],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "7\n"
        file.tensor[0] = 8
        print("go on", file=reader.stdin, flush=True)
        proof = bytes(file.tensor[-PROOF_BYTES:].tolist()).hex()
        assert reader.stdout.readline() == f"8 False {proof}\n"


def test_a_file_is_zeroed_and_keeps_its_size() -> None:
    file = SharedFile(SIZE)
    assert not file.tensor[:-PROOF_BYTES].any()
    assert file.tensor[-PROOF_BYTES:].any()
    assert file.num_bytes >= SIZE + PROOF_BYTES
    for size in (0, file.num_bytes - 1, file.num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file.allocation.fd, size)


def test_it_stays_mapped_as_long_as_a_view_of_it_lives() -> None:
    file = SharedFile(SIZE)
    allocation = file.allocation
    view = map_shared(os.getpid(), allocation)[100:200]
    file.tensor[100] = 5
    del file
    with pytest.raises(NotMappable):
        map_shared(os.getpid(), allocation)
    assert (view[0], maps_of(allocation.name)) == (5, 1)
    del view
    assert maps_of(allocation.name) == 0


def test_its_descriptor_is_closed_with_it() -> None:
    before = open_files()
    mapped = map_shared(os.getpid(), (file := SharedFile(SIZE)).allocation)
    del mapped, file
    assert open_files() <= before


def described(fd: int, num_bytes: int, name: str) -> SharedAllocation:
    return SharedAllocation(address=1 << 20, num_bytes=num_bytes, fd=fd, name=name)


def memory_file(name: str, size: int, seals: int) -> int:
    """A memory file that somebody else has made."""
    fd = os.memfd_create(f"kvferry-{name}", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe(name: str) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def regular_file(name: str) -> int:
    path = Path("/tmp") / f"memfd:kvferry-{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.ftruncate(fd, SIZE)
    return fd


HOSTILE: dict[str, tuple[Callable[[str], int], str]] = {
    "a file that may shrink": (lambda name: memory_file(name, SIZE, 0), "not sealed"),
    "a smaller file": (
        lambda name: memory_file(name, SIZE - 1, SEAL_SHRINK),
        "9999 bytes",
    ),
    "an empty file": (lambda name: memory_file(name, 0, SEAL_SHRINK), "has 0 bytes"),
    "a larger file": (
        lambda name: memory_file(name, SIZE + 1, SEAL_SHRINK),
        "10001 bytes",
    ),
    "another file": (
        lambda _: memory_file("0" * 32, SIZE, SEAL_SHRINK),
        "not '/memfd:",
    ),
    "a pipe": (pipe, "is 'pipe:"),
    "a regular file": (regular_file, "not '/memfd:"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_sealed_file_of_this_name_and_size_is_not_mapped(what: str) -> None:
    make, said = HOSTILE[what]
    name = secrets.token_hex(16)
    fd = make(name)
    before = open_files()
    try:
        with pytest.raises(NotMappable, match=said):
            map_shared(os.getpid(), described(fd, SIZE, name))
    finally:
        os.close(fd)
    assert open_files() <= before, "nothing was left open"
    assert maps_of(name) == 0


def test_neither_a_process_nor_a_number_that_is_gone_is_mapped() -> None:
    file = SharedFile(SIZE)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(NotMappable, match=f"/proc/{gone.pid}/fd/.*: No such file"):
        map_shared(gone.pid, file.allocation)
    absent = msgspec.structs.replace(file.allocation, fd=1 << 20)
    with pytest.raises(NotMappable, match="No such file"):
        map_shared(os.getpid(), absent)


def test_a_file_that_is_exchanged_between_the_look_and_the_opening_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number may become another file's in that moment."""
    file = SharedFile(SIZE)
    other = SharedFile(SIZE)
    open_path = os.open

    def exchanged(path: str, flags: int) -> int:
        # The end of the path alone: a process may have a number that begins with the file's.
        folder, _, _ = path.rpartition("/")
        return open_path(f"{folder}/{other.allocation.fd}", flags)

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(NotMappable, match="when it was opened"):
        map_shared(os.getpid(), file.allocation)


def test_two_files_of_a_process_are_told_apart_by_their_names() -> None:
    first, second = SharedFile(SIZE), SharedFile(SIZE)
    assert first.allocation.name != second.allocation.name
    assert not np.array_equal(first.tensor[-PROOF_BYTES:], second.tensor[-PROOF_BYTES:])
    exchanged = msgspec.structs.replace(first.allocation, fd=second.allocation.fd)
    with pytest.raises(NotMappable, match="not '/memfd:"):
        map_shared(os.getpid(), exchanged)
