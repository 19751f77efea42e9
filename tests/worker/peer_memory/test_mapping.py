"""The memory of one producer worker, mapped: what is, what is not and why, and when its process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import (
    LeaseTableAddress,
    SharedAllocation,
    SharedMemory,
    WorkerDescription,
)
from kvferry.protocol.slots import (
    ID_BYTES,
    PAGE_IDS,
    SLOT_BYTES,
    StreamRows,
)
from kvferry.worker.peer_memory import mapping
from kvferry.worker.peer_memory.host_memory import FileMemory
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peer_memory.port import PROOF_BYTES, NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile
from kvferry.worker.peer_memory.this_process import machine_id, pid_namespace
from tests.harness.caches import CacheShape, ToyCaches
from tests.open_files import open_files

MEMORY = FileMemory()
SLOTS = 4
PRODUCER = """
import sys
import time
import msgspec
from kvferry.worker.peer_memory.shared_file import SharedFile

file = SharedFile(int(sys.argv[1]))
file.tensor[: int(sys.argv[1])] = 3
print(msgspec.json.encode(file.allocation).decode(), flush=True)
time.sleep(600)
"""


class Described:
    """A worker of this process with a lease table and caches in files."""

    def __init__(self) -> None:
        self.table = SharedFile(SLOTS * SLOT_BYTES)
        self.caches = ToyCaches(CacheShape(), 0, shared=True)
        files = (self.table, *self.caches.kv.shared)
        self.shared = SharedMemory(
            machine=machine_id(),
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            allocations=tuple(file.allocation for file in files),
        )

    def worker(self, **fields: Any) -> WorkerDescription:
        """Its description, with some other fields."""
        table = LeaseTableAddress(address=self.table.address, slots=SLOTS)
        described: dict[str, Any] = {
            "place": Place(),
            "agent": "P",
            "agent_metadata": b"-",
            "memory": "DRAM",
            "device": 0,
            "lease_table": table,
            "tensors": self.caches.kv.tensors,
            "shared": self.shared,
        }
        return WorkerDescription(**described | fields)

    def sharing(self, **fields: Any) -> WorkerDescription:
        """Its description, with other fields of what it shares."""
        return self.worker(shared=msgspec.structs.replace(self.shared, **fields))


def test_every_byte_is_found_and_the_slots_are_those_of_the_table() -> None:
    described = Described()
    mapped = WorkerMapping(MEMORY, described.worker())
    described.table.tensor[:SLOT_BYTES] = 1
    assert mapped.slots.shape == (SLOTS, 2)
    assert mapped.slots.tolist() == [[0x0101010101010101] * 2] + [[0, 0]] * (SLOTS - 1)
    for number, tensor in enumerate(described.caches.kv.tensors):
        described.caches.kv.storages[number][:] = 7 + number
        allocation = mapped.files[1 + number]
        offset = mapped.address_of(tensor.base) - allocation.ctypes.data
        assert offset == tensor.base - described.caches.kv.storages[number].data_ptr()
        assert allocation[offset] == 7 + number


def test_the_proofs_are_the_ends_of_all_allocations() -> None:
    described = Described()
    mapped = WorkerMapping(MEMORY, described.worker())
    files = (described.table, *described.caches.kv.shared)
    assert mapped.proofs().tobytes() == b"".join(
        bytes(file.tensor[-PROOF_BYTES:].tolist()) for file in files
    )
    ends = [file.address + file.num_bytes - PROOF_BYTES for file in files]
    assert mapped.proof_addresses() == ends


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "another host": ({"machine": "0" * 36}, "on another host"),
    "another PID namespace": ({"pid_namespace": "pid:[1]"}, "--pid=host"),
    "nothing is shared": (
        {"allocations": (), "why_not": "caches are private"},
        "are private",
    ),
    "no such process": ({"pid": 2**22 + 1}, "is not found"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_mapped_says_why(case: str) -> None:
    fields, said = REASONS[case]
    with pytest.raises(NotMappable, match=said):
        WorkerMapping(MEMORY, Described().sharing(**fields))


def test_a_producer_that_shares_nothing_is_not_mapped() -> None:
    with pytest.raises(NotMappable, match="mapped_reads"):
        WorkerMapping(MEMORY, Described().worker(shared=None))


def test_where_loads_are_not_ordered_nothing_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapping, "KEEPS_ORDER", False)
    described = Described()
    with pytest.raises(NotMappable, match="may reorder loads"):
        WorkerMapping(MEMORY, described.worker())


def test_a_tensor_or_a_lease_table_outside_of_the_allocations_is_refused() -> None:
    """Also one that reaches into the proof, and one of which only the last block is outside."""
    described = Described()
    tensor, *others = described.caches.kv.tensors
    for change in (
        {"base": tensor.base - 4096},
        {"blocks": tensor.blocks * 100},
        {"base": 0},
    ):
        moved = (msgspec.structs.replace(tensor, **change), *others)
        with pytest.raises(NotMappable, match=r"layers\.0/kv: in none"):
            WorkerMapping(MEMORY, described.worker(tensors=moved))
    end = described.table.address + described.table.num_bytes
    for table in (
        LeaseTableAddress(
            address=described.table.address,
            slots=described.table.num_bytes // SLOT_BYTES,
        ),
        LeaseTableAddress(address=end, slots=1),
        LeaseTableAddress(address=described.table.address - SLOT_BYTES, slots=1),
    ):
        with pytest.raises(NotMappable, match="the lease table: in none"):
            WorkerMapping(MEMORY, described.worker(lease_table=table))
    with pytest.raises(NotMappable, match="multiple of 8"):
        WorkerMapping(
            MEMORY,
            described.worker(
                lease_table=LeaseTableAddress(
                    address=described.table.address + 4, slots=SLOTS
                )
            ),
        )


def test_the_end_of_its_process_is_noticed_and_its_memory_can_still_be_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(SLOTS * SLOT_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
    ) as producer:
        assert producer.stdout is not None
        allocation = msgspec.json.decode(
            producer.stdout.readline(), type=SharedAllocation
        )
        described = Described().sharing(pid=producer.pid, allocations=(allocation,))
        table = LeaseTableAddress(address=allocation.address, slots=SLOTS)
        mapped = WorkerMapping(
            MEMORY, msgspec.structs.replace(described, lease_table=table, tensors=())
        )
        assert not mapped.has_exited()
        producer.kill()
        producer.wait()
    assert mapped.has_exited()
    assert mapped.slots.tolist() == [[0x0303030303030303] * 2] * SLOTS
    mapped.close()
    mapped.close()


def test_nothing_of_a_mapping_is_left() -> None:
    described = Described()
    before = open_files()
    WorkerMapping(MEMORY, described.worker()).close()
    for fields, _ in REASONS.values():
        with pytest.raises(NotMappable):
            WorkerMapping(MEMORY, described.sharing(**fields))
    assert open_files() <= before


def test_rows_are_found_and_those_outside_of_the_allocations_are_refused() -> None:
    described = Described()
    (cache, *_) = described.caches.kv.shared
    rows = StreamRows(
        headers=cache.address, ids=cache.address + 64, rows=2, blocks=(3,)
    )
    mapped = WorkerMapping(MEMORY, described.worker(stream_rows=rows))
    assert mapped.row_headers is not None
    assert mapped.row_pages is not None
    cache.tensor[:64] = 5
    cache.tensor[64 : 64 + 2 * PAGE_IDS * ID_BYTES] = 6
    assert mapped.row_headers.tolist() == [[0x0505050505050505] * 2] * 2
    assert mapped.row_pages.tolist() == [[0x06060606] * PAGE_IDS] * 2
    end = cache.address + cache.num_bytes - PROOF_BYTES
    for fields, said in (
        ({"headers": end - 16}, "headers of rows: in none"),
        ({"headers": cache.address + 4}, "multiple of 8"),
        ({"ids": end - 2 * PAGE_IDS * ID_BYTES + 1}, "ids of rows: in none"),
        ({"ids": cache.address + 1}, "multiple of 4"),
    ):
        hostile = msgspec.structs.replace(rows, **fields)
        with pytest.raises(NotMappable, match=said):
            WorkerMapping(MEMORY, described.worker(stream_rows=hostile))


@pytest.mark.parametrize("num_bytes", [1, 8, PROOF_BYTES - 1])
def test_an_allocation_that_is_shorter_than_its_proof_is_refused(
    num_bytes: int,
) -> None:
    """Its proof would begin in front of it, and be of another length than the others'."""
    described = Described()
    files = described.shared.allocations
    short = msgspec.structs.replace(files[0], address=1 << 20, num_bytes=num_bytes)
    with pytest.raises(NotMappable, match="less than 16 bytes has no proof"):
        WorkerMapping(MEMORY, described.sharing(allocations=(*files, short)))


def hides(path: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A sandbox without this file of /proc."""

    def hide(patch: pytest.MonkeyPatch) -> None:
        readlink = os.readlink
        read_text = Path.read_text

        def without(name: str) -> str:
            if name == path:
                raise FileNotFoundError(path)
            return readlink(name)

        def text_without(name: Path) -> str:
            if str(name) == path:
                raise PermissionError(path)
            return read_text(name)

        patch.setattr(os, "readlink", without)
        patch.setattr(Path, "read_text", text_without)

    return hide


@pytest.mark.parametrize(
    "path", ["/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"]
)
def test_a_worker_that_cannot_name_its_host_starts_and_is_not_mapped(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory its caches lie in: every engine says where it is."""
    here = FileMemory().export(())
    with monkeypatch.context() as sandbox:
        hides(path)(sandbox)
        shared = FileMemory().export(())
        with pytest.raises(NotMappable, match="another"):
            FileMemory().open(here)
    assert (shared.machine, shared.pid_namespace) != (here.machine, here.pid_namespace)
    assert msgspec.json.decode(msgspec.json.encode(shared), type=SharedMemory) == shared
    with pytest.raises(NotMappable, match="another"):
        MEMORY.open(shared)


def test_a_worker_that_does_not_know_its_ipc_namespace_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hides("/proc/self/ns/ipc")(monkeypatch)
    assert FileMemory().export(()).ipc_namespace is None
