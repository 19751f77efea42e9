"""Notifications over NIXL: from a consumer's worker to a producer's worker.

Done: every worker of a consumer, to every worker of the producer that its plan names, after a good load.

    consumer's worker                                                 producer's worker
    Done{slot, epoch, consumer, worker, expected} ══════════════════► clears the slot at the last of `expected`

Frame: the four bytes `KVF1`, then one msgpack map with a `type`. Frames without the magic are ignored.
Evolution rules as in `kvferry.protocol.handshake`; a change that old readers would misunderstand needs a new magic.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import Hex128, HexEpoch, SlotIndex, WorkerCount, WorkerIndex

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
