"""Asking a producer to describe itself: one request, one answer, one deadline."""

from __future__ import annotations

import zmq

from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import (
    MAX_REPLY_BYTES,
    EngineDescription,
    Hello,
    Refused,
    Reply,
    channel_address,
    decode_reply,
    encode,
)

_MS = 1000


def fetch_description(host: str, port: int, engine_id: str, asker: str, timeout_s: float) -> EngineDescription:
    """Fetch the description of the engine that answers at an address.

    Raises:
        PeerRefused: the answer was a refusal.
        HandshakeFailed, InvalidMessage: as `ask`.
    """
    reply = ask(host, port, Hello(engine_id=engine_id, asker=asker), timeout_s)
    if isinstance(reply, Refused):
        where = f"{host}:{port}"
        raise PeerRefused(f"{where} refused: {reply.field!r} is {reply.value!r}; expected {reply.expected!r}")
    return reply


def ask(host: str, port: int, hello: Hello, timeout_s: float) -> Reply:
    """Ask the engine that answers at an address; a refusal is an answer as well.

    Waits, so it runs on a thread that may wait; everything it makes is gone when it returns.

    Raises:
        HandshakeFailed: nobody answered in time, or the address is none.
        InvalidMessage: the answer was none of the protocol's.
    """
    where = f"{host}:{port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * _MS))
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * _MS))
        socket.connect(channel_address(host, port))
        socket.send(encode(hello))
        frames = socket.recv_multipart()
    except zmq.Again:
        raise HandshakeFailed(f"{where} did not answer within {timeout_s:g} s") from None
    except (zmq.ZMQError, ValueError) as refused:
        raise HandshakeFailed(f"{where}: {refused}") from None
    finally:
        context.destroy(linger=0)
    if len(frames) != 1:
        raise HandshakeFailed(f"{where} answered in {len(frames)} frames; kvferry answers in one")
    return decode_reply(frames[0])
