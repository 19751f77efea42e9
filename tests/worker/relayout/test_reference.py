"""What the reference has beside the port's rules: it reads memory of other processes, which it cannot write."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvferry.worker.peer_memory.shared_file import SharedFile, map_shared
from kvferry.worker.relayout.reference import TORCH_TYPES, ReferenceRelayout
from kvferry.worker.relayout.shape import ElementConversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import WaveTable


@pytest.mark.parametrize("source", ElementType, ids=lambda kind: kind.value)
def test_mapped_memory_is_converted_without_a_warning(source: ElementType) -> None:
    """Also if its elements lie together, so that they could be converted where they are."""
    count = 64
    file = SharedFile(count * source.num_bytes)
    mapped = map_shared(os.getpid(), file.allocation)
    typed = file.tensor[: count * source.num_bytes].view(TORCH_TYPES[source])
    typed[:] = torch.arange(count, dtype=torch.float32) / 8
    caches = torch.zeros(count * 2, dtype=torch.uint8)
    shape = Shape(
        axes=(), run=count, conversion=ElementConversion(source, ElementType.BFLOAT16)
    )
    row = (mapped.ctypes.data, caches.data_ptr(), 0, 0, 1, 0)
    units = np.zeros((1, 4), dtype=np.int32)
    relayout = ReferenceRelayout([mapped], [caches])
    assert relayout.try_start(WaveTable.from_rows([shape], [row], units)) is not None
    assert torch.equal(caches.view(torch.bfloat16).float(), typed.float())
