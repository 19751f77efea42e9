"""A fabric whose reads take as long as over a link of a set bandwidth."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    RemoteDescriptors,
    Transfer,
    TransferState,
)
from tests.harness.fault_fabric import FaultFabric


class LinkFabric(FaultFabric):
    """Reads go over the link one after the other: each is DONE when the fabric behind has ended it and the link could
    have carried its bytes.

    Args:
        bytes_per_s: of the link.
    """

    def __init__(self, inner: Fabric, bytes_per_s: float) -> None:
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s
        self._lengths: dict[LocalDescriptors, npt.NDArray[np.int64]] = {}
        self._due_s: dict[Transfer, float] = {}
        self._free_s = 0.0

    def prepare_local(self, rows: DescriptorRows) -> LocalDescriptors:
        made = super().prepare_local(rows)
        self._lengths[made] = np.repeat(rows.rows[:, 1], rows.rows[:, 4])
        return made

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        begin_s = max(self._free_s, time.monotonic())
        made = super().post_read(local, local_indices, remote, remote_indices)
        self._free_s = (
            begin_s + int(self._lengths[local][local_indices].sum()) / self._bytes_per_s
        )
        self._due_s[made] = self._free_s
        return made

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        return (
            TransferState.IN_FLIGHT
            if time.monotonic() < self._due_s[transfer]
            else state
        )

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        if isinstance(handle, Transfer):
            self._due_s.pop(handle, None)
        elif isinstance(handle, LocalDescriptors):
            self._lengths.pop(handle, None)
        super().release(handle)
