"""Messages between listener and client of `kvferry bench`: msgpack, one frame each way over the side channel's sockets.

client                       listener
Join{session, metadata}  →
                         ←   Offer | Refused
Alive{session}           →                     every few seconds, or the session ends
                         ←   Noted | Refused
Leave{session, wrong}    →
                         ←   Noted | Refused
"""

from __future__ import annotations

import msgspec

from kvferry.cli.transfer.messages import VERSION, Metadata, Offer
from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import Refused
from kvferry.protocol.ids import Count, Hex128, Positive, Text

MAX_FRAME_BYTES = 160 << 10


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="bench join"):
    """A client wants to read. `session` is a random id of this client; the metadata is its NIXL agent's."""

    version: Positive = VERSION
    session: Hex128
    host: Text
    agent_metadata: Metadata


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="bench alive"):
    """The session goes on."""

    session: Hex128


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="bench leave"):
    """The session is over. `wrong`: number of wrong bytes. `complete`: all cases were measured."""

    session: Hex128
    wrong: Count
    complete: bool


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="bench noted"):
    """Acknowledges `Alive` and `Leave`."""


Request = Join | Alive | Leave
Reply = Offer | Noted | Refused

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return msgspec.msgpack.encode(message)


def decode_request(frame: bytes) -> Request:
    """A frame that a listener received. Raises `InvalidMessage`."""
    return decode(frame, _requests, MAX_FRAME_BYTES, InvalidMessage)


def decode_reply(frame: bytes) -> Reply:
    """A reply of a listener. Raises `InvalidMessage`."""
    reply = decode(frame, _replies, MAX_FRAME_BYTES, InvalidMessage)
    if isinstance(reply, (Offer, Refused)) and reply.version != VERSION:
        raise InvalidMessage("version", reply.version, str(VERSION))
    return reply
