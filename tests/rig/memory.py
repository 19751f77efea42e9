"""The memory of one rig worker: real allocations, filled with noise or a request's values, and checked whole."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, Device
from kvferry.worker.peer_memory.shared_file import SharedFile
from tests.geometry.caches import Caches
from tests.geometry.cells import UNNAMED, Ints, Memory, number_of, spell
from tests.geometry.effects import Wanted, produced, wanted
from tests.geometry.requests import Request
from tests.rig.floats import element_names, has_floats, stored_bytes

Bytes = npt.NDArray[np.uint8]
Numbers = dict[tuple[str, str], int]


def noise(names: Ints) -> Bytes:
    """A byte for every name: it follows from layer, kind, head, tokens and index, and neighbours differ."""
    word = names.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((word >> np.uint64(56)).astype(np.uint8))


class WorkerMemory:
    """Real memory for the caches of one worker, full of noise.

    Args:
        floats: whether tensors of floats hold values that every format has; otherwise a byte is a byte.

    Attributes of the class:
        device: of all that are made; `--device cuda` changes it.

    Attributes:
        kv: the same memory as it is passed to kvferry.
    """

    device: ClassVar[Device] = HOST

    def __init__(self, caches: Caches, seed: int, *, floats: bool = False) -> None:
        draw = np.random.default_rng(seed)
        files: list[SharedFile] = []
        if self.device is HOST:
            # So that consumers may map them, if the settings let them.
            files = [SharedFile(size) for size in caches.sizes]
            storages = [
                file.tensor[:size]
                for file, size in zip(files, caches.sizes, strict=True)
            ]
        else:
            storages = [
                torch.empty(size, dtype=torch.uint8, device=self.device.where)
                for size in caches.sizes
            ]
        for storage in storages:
            storage.copy_(
                torch.from_numpy(draw.integers(0, 256, len(storage), np.uint8))
            )
        addresses = [storage.data_ptr() for storage in storages]
        self.kv = KvCaches(
            tuple(storages), caches.at(addresses), self.device, tuple(files)
        )
        self._memory = Memory(addresses, caches.sizes)
        self._floats = [x for x in self.kv.tensors if floats and has_floats(x.format)]
        self._parts = sorted(storages, key=lambda storage: storage.data_ptr())

    def snapshot(self) -> Bytes:
        """The memory as it is now, guards included."""
        return np.concatenate(
            [np.empty(0, np.uint8), *(part.cpu().numpy() for part in self._parts)]
        )

    def fill(
        self, groups: tuple[CacheGroup, ...], request: Request, numbers: Numbers
    ) -> None:
        """Write the values of the request's tokens, as a prefill would; everything else stays noise."""
        names = produced(self.kv.tensors, groups, self._memory, request, numbers)
        content = np.where(names >= 0, self._values(names, numbers), self.snapshot())
        at = 0
        for part in self._parts:
            part.copy_(torch.from_numpy(content[at : at + len(part)]))
            at += len(part)

    def _values(self, names: Ints, numbers: Numbers) -> Bytes:
        """The values of named bytes."""
        found = noise(names)
        number = number_of(names)
        for tensor in self._floats:
            own = (names >= 0) & (number == numbers.get(tensor.name, UNNAMED))
            patterns = noise(element_names(tensor, names[own]))
            found[own] = stored_bytes(tensor, names[own], patterns)
        return found

    def check_loaded(
        self,
        before: Bytes,
        groups: tuple[CacheGroup, ...],
        request: Request,
        numbers: Numbers,
    ) -> None:
        """Check every byte: the request's have arrived, its loaded blocks hold nothing else, and no other has changed.

        Raises:
            AssertionError: naming the wrong byte.
        """
        target = wanted(self.kv.tensors, groups, self._memory, request, numbers)
        now, right = self.snapshot(), self._values(target.names, numbers)
        _expect(target.required & (now != right), target, "is wrong", numbers)
        _expect(
            target.tail & (now != 0),
            target,
            "is behind the request and not zero",
            numbers,
        )
        neither = target.optional & (now != right) & (now != 0)
        _expect(
            neither & target.loaded,
            target,
            "is before the window, and neither right nor zero",
            numbers,
        )
        changed = now != before
        free = (target.optional & ~neither) | (target.late & (now == 0))
        others = ~(target.required | target.tail | free)
        _expect(
            others & changed, target, "is not the request's and has changed", numbers
        )


def _expect(
    wrong: npt.NDArray[np.bool_], target: Wanted, what: str, numbers: Numbers
) -> None:
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise AssertionError(
            f"{spell(int(target.names[at]), numbers)} {what}; {int(wrong.sum())} bytes in all"
        )
