"""The word in a lease slot: what a consumer reads before and after the data.

    bits 63 … 4   epoch, 60 random bits, never zero
    bits  3 … 0   state

Eight bytes, little endian, written with one aligned store. An empty slot is 0.
"""

from __future__ import annotations

import enum

from kvferry.protocol.ids import Epoch

SLOT_BYTES = 8
EMPTY = 0


class SlotState(enum.IntEnum):
    """What a slot says about the blocks of its lease."""

    COMPUTING = 1
    """The producer may still write them."""
    READY = 2
    """They are complete and held."""


def slot_word(epoch: Epoch, state: SlotState) -> int:
    """The 64-bit word of a slot."""
    return epoch << 4 | state
