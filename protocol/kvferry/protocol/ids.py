"""Types of the identifiers that cross process borders, with the bounds that their decoders enforce.

The words in a lease slot, which a consumer reads before and after the data:

    word 0   bits 63 … 4    epoch, 60 random bits, never zero
             bits  3 … 0    state
    word 1   bits 63 … 24   the lowest 40 bits of the epoch
             bits 23 … 0    leading tokens of the prompt that are complete, while the state is COMPUTING

Eight bytes each, little endian, each written with one aligned store. The words of an empty slot are 0.
"""

from __future__ import annotations

import enum
import secrets
from typing import Annotated, NewType

from msgspec import Meta

BootId = NewType("BootId", str)
"""One life of an engine: 128 random bits as 32 hexadecimal digits, new at every start."""

Epoch = NewType("Epoch", int)
"""One lease of one slot: 60 random bits, never zero. The slot itself holds `epoch << 4 | state`."""

EPOCH_BITS = 60

# No control characters, which could forge lines of a log; no lone surrogates, which cannot be encoded.
_NAME = r"\A[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z"
Text = Annotated[str, Meta(min_length=1, max_length=512, pattern=_NAME)]
"""A name of a host, an engine, a request or a layer."""
# Numbers of more than 53 bits are text: some routers decode JSON numbers to float64, which would change them.
Hex128 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Hex256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
HexEpoch = Annotated[str, Meta(pattern=r"\A(?!0+\Z)[0-9a-f]{15}\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Size = Annotated[int, Meta(ge=1, le=65536)]
"""A parallel size."""
Rank = Annotated[int, Meta(ge=0, le=65535)]
MAX_WORKERS = 4096
"""Most workers of an engine."""
WorkerIndex = Annotated[int, Meta(ge=0, lt=MAX_WORKERS)]
WorkerCount = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
SlotIndex = Annotated[int, Meta(ge=0, lt=2**24)]
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def new_boot_id() -> BootId:
    """A fresh boot id."""
    return BootId(secrets.token_hex(16))


def new_epoch() -> Epoch:
    """A fresh epoch."""
    # Random, not counted: it is also the proof that a message about a lease comes from who has its ticket. And a slot
    # that is used again must not show an epoch that an old ticket names.
    return Epoch(secrets.randbits(EPOCH_BITS - 1) + 1)


def epoch_to_text(epoch: Epoch) -> str:
    """The epoch as it is sent: 15 lowercase hexadecimal digits."""
    return f"{epoch:015x}"


def epoch_from_text(text: str) -> Epoch:
    """Inverse of `epoch_to_text`; `text` has been validated as `HexEpoch`."""
    return Epoch(int(text, 16))


SLOT_BYTES = 16
EMPTY = 0
PROGRESS_BITS = 24
MAX_PROGRESS = (1 << PROGRESS_BITS) - 1
"""Most tokens that a progress word can report."""


class SlotState(enum.IntEnum):
    """State of the blocks of a lease, as its slot shows it."""

    COMPUTING = 1
    """The producer may still write them."""
    READY = 2
    """They are complete and held."""


def slot_word(epoch: Epoch, state: SlotState) -> int:
    """The first 64-bit word of a slot."""
    return epoch << 4 | state


def progress_word(epoch: Epoch, tokens: int) -> int:
    """The second word of a slot: this many leading tokens of the prompt are complete; at most `MAX_PROGRESS`."""
    return _tag(epoch) << PROGRESS_BITS | min(tokens, MAX_PROGRESS)


def progress_of(word: int, epoch: Epoch) -> int:
    """The complete tokens that a slot's second word reports under this epoch: 0 if it is of another one."""
    if word >> PROGRESS_BITS != _tag(epoch):
        return 0
    return word & MAX_PROGRESS


_TAG_MASK = (1 << (64 - PROGRESS_BITS)) - 1


def _tag(epoch: Epoch) -> int:
    # The two words are written one after the other, so a reader may see the tokens of one lease beside the epoch of the
    # next. The epoch's low bits in the second word tell them apart.
    return epoch & _TAG_MASK
