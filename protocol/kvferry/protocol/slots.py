"""What a consumer's worker reads of a lease over NIXL beside the blocks, and what it answers: slots, rows, `Done`.

Slot: one for each lease, read before and after the data.

    word 0   bits 63 … 4    epoch, 60 random bits, never zero
             bits  3 … 0    state
    word 1   bits 63 … 24   the lowest 40 bits of the epoch
             bits 23 … 0    leading tokens of the prompt that are complete, while the state is COMPUTING

Eight bytes each, little endian, each written with one aligned store. The words of an empty slot are 0.

Streamed read: both legs of a request at once. Its prompt is read step by step, while it is computed.

    router               producer                                                  consumer
      ├── prompt ───────►│                                                           │
      ├── the same prompt, NamedPrefill{remote_engine_id, …} ───────────────────────►│
      │                  │◄──────── Subscribe{queries: [PromptQuery{key, …}], …} ────┤
      │                  ├── Answers{answers: [Answer{progress: queued, …}], …} ────►│
      │                  │ schedules the first step                                  │
      │                  ├── Answers{answers: [Answer{progress: ticket, …}], …} ────►│ takes Ticket{stream_row, …}
      │                  │ lists its blocks in the row                               │
      │                  │ a step has ended: writes its tokens into the slot         │
      │                  │◄═════════════ reads slot, row's header, ids, blocks ══════╡ where LeaseTableAddress{…} and
      │                  │ … for each step but the last                              │ StreamRows{…} say
      │                  │ the last step has ended: the slot is READY                │
      │                  │◄═════════════════ reads slot, ids, blocks, slot again ════╡
      │                  │◄══ Done{slot, epoch, consumer, worker, expected} ═════════╡
      │◄── one token ────┤                                                           │
      │◄──────────────────────────────────────────────────────────────── tokens ─────┤

Row: where a producer's workers list the blocks of a prompt that is being computed. It belongs to one lease, from the
first step after a consumer has queried its prompt until the lease is over. It has a header and block ids:

    header   word 0   `epoch << 4 | 1` of the lease's first epoch, which its consumers know; 0 in a free row
             word 1   the same of its present epoch, which is another one once the request was preempted
    ids      uint32: for each cache group in turn, room for the listed blocks of any prompt, in the order of the tokens

Ids are written before the progress word that makes them valid. So a consumer reads the slot, then the ids, then the
blocks, each when the read before has ended. Of windows, chunks and states the blocks from the ticket's `held_from` on
are listed, shortly before the slot becomes READY.

Done: every worker of a consumer, to every worker of the producer that its plan names, after a good load.

    consumer's worker                                                 producer's worker
    Done{slot, epoch, consumer, worker, expected} ══════════════════► clears the slot at the last of `expected`

Frame: the four bytes `KVF1`, then one msgpack map with a `type`. Frames without the magic are ignored.
Evolution rules as in `kvferry.protocol.handshake`; a change that old readers would misunderstand needs a new magic.
"""

from __future__ import annotations

import enum
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import (
    EPOCH_BITS,
    MAX_GROUPS,
    Address,
    Epoch,
    Hex128,
    HexEpoch,
    SlotIndex,
    WorkerCount,
    WorkerIndex,
)

# Slots.

SLOT_BYTES = 16
EMPTY = 0
PROGRESS_BITS = 24
MAX_PROGRESS = (1 << PROGRESS_BITS) - 1
"""Most tokens that a progress word can report."""


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


# Rows.

STREAM_ROWS = 64
"""Most prompts of one engine that are read while they are computed, at the same time."""
PAGE_IDS = 256
"""Block ids that one read of a row fetches; rows are padded to whole pages."""
ID_BYTES = 4
ROW_HEADER_BYTES = 16

RowIndex = Annotated[int, Meta(ge=0, lt=STREAM_ROWS)]
RowBlocks = Annotated[int, Meta(ge=1, le=1 << 20)]


class StreamRows(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a worker's rows, in host memory.

    Attributes:
        headers: address of the headers, which follow each other.
        ids: address of the ids of row 0; those of the next rows follow.
        rows: number of rows.
        blocks: per cache group the most listed blocks of one prompt.
    """

    headers: Address
    ids: Address
    rows: Annotated[int, Meta(ge=1, le=STREAM_ROWS)]
    blocks: Annotated[tuple[RowBlocks, ...], Meta(min_length=1, max_length=MAX_GROUPS)]

    @property
    def pages(self) -> int:
        """Pages of one row."""
        return -(-sum(self.blocks) // PAGE_IDS)


def header_word(epoch: Epoch) -> int:
    """A word of a row's header."""
    return epoch << 4 | 1


# The notification.

MAGIC = b"KVF1"
MAX_NOTIFICATION_BYTES = 4096


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """One consumer worker has finished its reads under this lease from the addressed worker.

    Attributes:
        slot, epoch: the lease; the epoch proves that the sender has its ticket.
        consumer: boot of the reading engine.
        worker: index of the reading worker in its engine.
        expected: number of workers of that engine that read from the addressed worker or must notify it.
    """

    slot: SlotIndex
    epoch: HexEpoch
    consumer: Hex128
    worker: WorkerIndex
    expected: WorkerCount


_decoder: msgspec.msgpack.Decoder[Done] = msgspec.msgpack.Decoder(Done)
_encoder = msgspec.msgpack.Encoder()


def encode_notification(message: Done) -> bytes:
    """The notification as NIXL sends it."""
    return MAGIC + _encoder.encode(message)


def decode_notification(frame: bytes) -> Done:
    """Inverse of `encode_notification`.

    Raises:
        InvalidMessage: it is not one of kvferry's, or malformed.
    """
    if not frame.startswith(MAGIC):
        raise InvalidMessage("magic", bytes(frame[:4]), repr(MAGIC))
    return decode(frame[len(MAGIC) :], _decoder, MAX_NOTIFICATION_BYTES, InvalidMessage)
