"""A long description is sent in parts.

Handshake in parts: as many exchanges as the description needs, on one connection.

    consumer's worker                                                 producer's scheduler
    Hello{at: 0, …} ────────────────────────────────────────────────►
        ◄────── DescriptionPart{total_bytes, digest, at: 0, data}     or the whole of a short one, or a refusal
    Hello{at: 262144, …} ───────────────────────────────────────────►
        ◄────── DescriptionPart{total_bytes, digest, at: 262144, data}
    … until `total_bytes` have come; another `digest` means that the description has changed, and the handshake fails

A description of 64 MiB is allowed, but a connection that may bring 64 MiB may bring as many bytes of empty frames,
which are 2.3 GB in ZMQ's memory: six handshakes took 5 GB. In parts they take 140 MB.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import (
    MAX_PART_BYTES,
    MAX_PART_FRAME_BYTES,
    DescriptionPart,
    Refused,
    UnreadDescription,
    encode,
)

_decoder: msgspec.msgpack.Decoder[UnreadDescription | Refused | DescriptionPart] = (
    msgspec.msgpack.Decoder(UnreadDescription | Refused | DescriptionPart)
)


class PartsSent:
    """The frame of a description, and the parts of it that answer a `Hello`."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self._digest = _digest_of(frame)

    def answer(self, at: int | None) -> bytes:
        """The frame that answers a `Hello` with this `at`.

        Returns:
            A part; the whole description for a client that takes no parts, and where it is short enough to be one.

        Raises:
            InvalidMessage: there is no such part.
        """
        if at is None:
            return self.frame
        total_bytes = len(self.frame)
        if at == 0 and total_bytes <= MAX_PART_BYTES:
            return self.frame
        if at >= total_bytes:
            raise InvalidMessage("at", at, f"less than {total_bytes}")
        part = DescriptionPart(
            total_bytes=total_bytes,
            digest=self._digest,
            at=at,
            data=self.frame[at : at + MAX_PART_BYTES],
        )
        return encode(part)


class PartsReceived:
    """The frames that answer a `Hello`, put together."""

    def __init__(self) -> None:
        self._first: DescriptionPart | None = None
        self._parts: list[bytes] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that have come, so the next `at`."""
        return sum(map(len, self._parts))

    def take(self, frame: bytes) -> bytes | None:
        """The whole answer; None if more parts are to come.

        Raises:
            InvalidMessage: it is no answer, or not the part that comes next.
        """
        answer = decode(frame, _decoder, MAX_PART_FRAME_BYTES, InvalidMessage)
        if isinstance(answer, DescriptionPart):
            return self._take_part(answer)
        # A short description or a refusal is the whole answer, but only in place of the first part.
        if self._first is not None:
            raise InvalidMessage(
                "type", "another answer", "the next part of the description"
            )
        return frame

    def _take_part(self, part: DescriptionPart) -> bytes | None:
        self._check(part)
        self._parts.append(part.data)
        if self.num_bytes < part.total_bytes:
            return None
        frame = b"".join(self._parts)
        if _digest_of(frame) != part.digest:
            raise InvalidMessage("digest", part.digest, "the digest of what has come")
        return frame

    def _check(self, part: DescriptionPart) -> None:
        if self._first is None:
            self._first = part
        first = self._first
        # The engine may have restarted between two parts, and have another description.
        if (part.total_bytes, part.digest) != (first.total_bytes, first.digest):
            expected = f"{first.digest}: a part of the same description"
            raise InvalidMessage("digest", part.digest, expected)
        start = self.num_bytes
        num_expected = min(MAX_PART_BYTES, part.total_bytes - start)
        if part.at != start or len(part.data) != num_expected:
            sent = f"{len(part.data)} bytes at {part.at}"
            raise InvalidMessage("data", sent, f"{num_expected} bytes at {start}")


def _digest_of(frame: bytes) -> str:
    return hashlib.blake2b(frame, digest_size=16).hexdigest()
