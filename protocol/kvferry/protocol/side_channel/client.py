"""The client of other engines' side channels: handshakes, renewals, releases and prewarming all use it.

One thread with an asyncio loop has all of a client's sockets. So a host that does not answer delays no other, and what
waits costs a socket and no thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvferry.protocol.errors import ConnectionEnded, HandshakeFailed, NothingListens, PeerRefused
from kvferry.protocol.handshake import (
    MAX_PART_FRAME_BYTES,
    EngineDescription,
    Hello,
    PartsReceived,
    Refused,
    decode_reply,
    encode,
)
from kvferry.protocol.side_channel.allowed_hosts import AllowedHosts
from kvferry.protocol.side_channel.connection import Connection, EndlessMessages, within
from kvferry.protocol.side_channel.host_names import HostNames
from kvferry.protocol.side_channel.hosts import Address, advice, host_port, read_address
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys

_JOIN_S = 5.0
_MOST_ENDS = 3
"""A listener that restarts ends a connection once."""

MAX_EXCHANGED_BYTES = 2 << 20
"""Of an answer to a request that is not interpreted here."""

Converse = Callable[[Connection], Coroutine[Any, Any, bytes]]

T = TypeVar("T")


class SideChannelClient:
    """Connects to listeners until `close`. May be used from any thread; coroutines run on its own.

    Args:
        secrets: of the side channel; with each listener the one that it has is used.
        allowed: hosts that may be connected to; by default those that need no list (`AllowedHosts.without_list`).

    Raises:
        InvalidSecretFile: there are secrets, but ZMQ has no CURVE.
        RuntimeError: the system gives no more threads.
    """

    def __init__(self, secrets: Secrets = (), allowed: AllowedHosts | None = None) -> None:
        derive_keys(secrets)
        self._secrets = secrets
        self._allowed = allowed if allowed is not None else AllowedHosts.without_list(secrets)
        self._names = HostNames()
        self._lock = threading.Lock()
        self._is_closing = False
        self._context = zmq.asyncio.Context(io_threads=1)
        # By default a context has 1,023 sockets, which were 341 connections of three each. Beyond that renewals failed
        # with "Too many open files", whatever `ulimit -n` said. Files are what bounds the number of connections.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._loop = asyncio.SelectorEventLoop()
        self._endless = EndlessMessages()
        self._thread = threading.Thread(target=self._run, name="kvferry-side-channel", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._context.term()
            self._endless.close()
            self._loop.close()
            raise

    def __enter__(self) -> SideChannelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For any thread that may wait.

    def fetch_description(
        self,
        host: str,
        port: int,
        engine_id: str,
        client_id: str,
        timeout_s: float,
        *,
        queries_prompts: bool = False,
        waits: bool = True,
    ) -> EngineDescription:
        """The description of the engine that answers at an address.

        Args:
            queries_prompts: whether the asker is an engine that asks for prompts, see `Hello`.
            waits: as `exchange`.

        Raises:
            PeerRefused: the answer was a refusal, or as `exchange`.
            HandshakeFailed: as `exchange`.
            InvalidMessage: the answer is not one of the protocol's.
        """
        hello = Hello(engine_id=engine_id, client_id=client_id, queries_prompts=queries_prompts)
        exchange = self._exchange(
            host,
            port,
            lambda connection: describe(connection, hello),
            MAX_PART_FRAME_BYTES,
            timeout_s,
            waits=waits,
        )
        reply = decode_reply(self.wait_for(exchange))
        if isinstance(reply, Refused):
            why = refusal(reply)
            if (
                reply.field == "engine_id"
            ):  # another engine: perhaps one of this host, where that of another was meant
                why += advice(host)
            raise PeerRefused(f"{host_port(host, port)} {why}")
        return reply

    def exchange(
        self, host: str, port: int, request: bytes, timeout_s: float, *, waits: bool = True
    ) -> bytes:
        """Send one frame to a listener and return the one frame of its answer, which has `MAX_EXCHANGED_BYTES` at most;
        neither is interpreted.

        Args:
            waits: whether to wait for a listener as long as there is none.

        Raises:
            HandshakeFailed: no answer came in time, the address is invalid, or the client was closed.
            PeerRefused: the secrets of both ends do not match; raised as soon as that is known.
        """

        async def converse(connection: Connection) -> bytes:
            await connection.send(request)
            return await connection.receive()

        return self.wait_for(
            self._exchange(host, port, converse, MAX_EXCHANGED_BYTES, timeout_s, waits=waits)
        )

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            HandshakeFailed: the client was closed.
        """
        with self._lock:
            if self._is_closing:
                coroutine.close()
                raise HandshakeFailed("this side channel is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise HandshakeFailed("this side channel is closed") from None

    # For any thread; never wait.

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run this on the loop; nothing after `close`."""
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(call)

    def watch(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Call this on the loop whenever the file is readable, until `close`."""
        self.call_soon(lambda: self._loop.add_reader(descriptor, on_readable))

    def close(self) -> None:
        """End everything under way, and the thread. Idempotent."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

    # On the loop.

    async def connect(
        self, host: str, port: int, max_answer_bytes: int, *, waits: bool = False
    ) -> Connection:
        """Connect to a listener.

        Every connection of this process to a side channel is made here, so this is where hosts are judged.

        Args:
            waits: whether to wait for a listener as long as there is none.

        Raises:
            NothingListens: there is none, and it does not wait.
            HandshakeFailed: there is no such host, or it is not allowed.
            PeerRefused: the secrets of both ends do not match.
        """
        address = await self._allowed_address(host)
        try:
            return await Connection.open(
                self._context, address, port, self._secrets, max_answer_bytes, self._endless, waits
            )
        except NothingListens as closed:
            raise NothingListens(f"{closed}{advice(host)}") from None
        except (zmq.ZMQError, ValueError) as refused:
            raise HandshakeFailed(f"cannot be connected: {refused}") from None

    async def _allowed_address(self, host: str) -> Address:
        """The address to connect to: looked up once, judged, and then used, so that no later answer counts."""
        why = self._allowed.why_not(host)
        if why is not None:
            raise HandshakeFailed(why)
        found = await self._names.address(host)
        address = read_address(found) if found is not None else None
        if address is None:
            raise HandshakeFailed("cannot be looked up")
        why = self._allowed.why_not_found(host, address)
        if why is not None:
            raise HandshakeFailed(why)
        return address

    async def _exchange(
        self,
        host: str,
        port: int,
        converse: Converse,
        max_answer_bytes: int,
        timeout_s: float,
        *,
        waits: bool,
    ) -> bytes:
        where = host_port(host, port)
        try:
            asking = self._ask_until_answered(host, port, converse, max_answer_bytes, waits=waits)
            return await within(timeout_s, asking, advice(host))
        except PeerRefused as refused:
            raise PeerRefused(f"{where} cannot be spoken to: {refused}") from None
        except HandshakeFailed as failed:
            raise HandshakeFailed(f"{where} {failed}") from None

    async def _ask_until_answered(
        self, host: str, port: int, converse: Converse, max_answer_bytes: int, *, waits: bool
    ) -> bytes:
        for _ in range(_MOST_ENDS):
            connection = await self.connect(host, port, max_answer_bytes, waits=waits)
            try:
                return await converse(connection)
            except ConnectionEnded:
                continue
            finally:
                connection.close()
        raise HandshakeFailed(f"ended {_MOST_ENDS} connections without an answer")

    def _run(self) -> None:
        try:
            with contextlib.suppress(zmq.ZMQError):
                self._context.socket(zmq.PAIR).close(
                    linger=0
                )  # starts ZMQ's threads now, not with the first message
            self._loop.call_soon(self._endless.begin)
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_others())
            self._context.destroy()
            self._endless.close()
            self._loop.close()


async def describe(connection: Connection, hello: Hello) -> bytes:
    """The frame of the listener's description, or of its refusal. A long description comes in parts, so that a
    connection that brings more than one part at a time can be ended.

    Raises:
        ConnectionEnded: the connection has ended before.
        InvalidMessage: a part is not the one that comes next.
    """
    received = PartsReceived()
    while True:
        await connection.send(encode(msgspec.structs.replace(hello, at=received.num_bytes)))
        frame = received.take(await connection.receive())
        if frame is not None:
            return frame


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop. Repeated: before Python 3.12 `wait_for` can swallow a cancellation."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=0.1)


def refusal(refused: Refused) -> str:
    """A listener's refusal, as text with control characters escaped."""
    field, value, expected = (
        repr(text)[1:-1] for text in (refused.field, refused.value, refused.expected)
    )
    return f"refused: {field} is {value}; expected {expected}"
