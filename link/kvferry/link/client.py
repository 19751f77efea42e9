"""The client of other engines' side channels: handshakes, renewals, releases, queries and prewarming all use it.

One thread with an asyncio loop has all of a client's sockets. So a host that does not answer delays no other, and
waiting costs a socket and no thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import zmq

from kvferry.link import limits
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.connection import Connection, EndlessMessages, within
from kvferry.link.host_names import HostNames
from kvferry.link.secrets import Secrets
from kvferry.link.sockets import derive_keys
from kvferry.protocol.errors import (
    ConnectionEnded,
    HandshakeFailed,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import (
    MAX_PART_FRAME_BYTES,
    EngineDescription,
    Hello,
    PartsReceived,
    Refused,
    decode_reply,
    encode,
)
from kvferry.protocol.hosts import IpAddress, advice, host_port, read_address

_CLOSED = "this side channel is closed"

Converse = Callable[[Connection], Coroutine[Any, Any, bytes]]
Ask = Callable[[bytes], Awaitable[bytes]]

T = TypeVar("T")
OnEnd = Callable[[T | Exception], None]


class SideChannelClient:
    """Connects to listeners until `close`. May be used from any thread; coroutines run on its own.

    Args:
        secrets: of the side channel; with each listener the one that it has is used.
        allowed: hosts that may be connected to; by default those that need no list (`AllowedHosts.without_list`).

    Raises:
        InvalidSecretFile: there are secrets, but ZMQ has no CURVE.
        OSError, RuntimeError: the system gives no more files, or no more threads.
    """

    def __init__(
        self, secrets: Secrets = (), allowed: AllowedHosts | None = None
    ) -> None:
        derive_keys(secrets)
        self._secrets = secrets
        self._allowed = (
            allowed if allowed is not None else AllowedHosts.without_list(secrets)
        )
        self._names = HostNames()
        self._lock = threading.Lock()
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.term)
            # By default a context has 1,023 sockets: 341 connections of three sockets each. Beyond that renewals failed
            # with "Too many open files", whatever `ulimit -n` said. So only files bound the number of connections.
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
            self._loop = asyncio.SelectorEventLoop()
            undo.callback(self._loop.close)
            self._endless = EndlessMessages()
            undo.callback(self._endless.close)
            self._thread = threading.Thread(
                target=self._run, name="kvferry-side-channel", daemon=True
            )
            self._thread.start()
            undo.pop_all()

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
            queries_prompts: whether the caller is an engine that queries prompts, see `Hello`.
            waits: as `exchange`.

        Raises:
            PeerRefused: the answer was a refusal, or as `exchange`.
            HandshakeFailed: as `exchange`.
            InvalidMessage: the answer is not one of the protocol's.
        """
        frame = self.wait_for(
            self.describe(
                host,
                port,
                engine_id,
                client_id,
                timeout_s,
                queries_prompts=queries_prompts,
                waits=waits,
            )
        )
        return read_description(frame, host, port)

    def exchange(
        self,
        host: str,
        port: int,
        request: bytes,
        timeout_s: float,
        *,
        waits: bool = True,
    ) -> bytes:
        """Send one frame to a listener and return the one frame of its answer. Neither is interpreted.

        Args:
            waits: whether to wait for a listener as long as there is none.

        Raises:
            HandshakeFailed: no answer came in time, it is longer than `MAX_EXCHANGED_BYTES`, the address is invalid, or
                the client was closed.
            PeerRefused: the secrets of both ends do not match; raised as soon as that is known.
        """

        async def converse(connection: Connection) -> bytes:
            return await _ask(connection, request)

        exchange = self._exchange(
            host,
            port,
            converse,
            limits.MAX_EXCHANGED_BYTES,
            timeout_s,
            waits=waits,
        )
        return self.wait_for(exchange)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            HandshakeFailed: the client was closed.
        """
        with self._lock:
            # A forked process has the client without its thread, and would wait for ever.
            if self._is_closing or not self._thread.is_alive():
                coroutine.close()
                raise HandshakeFailed(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise HandshakeFailed(_CLOSED) from None

    # For any thread; never wait.

    def start(self, coroutine: Coroutine[Any, Any, T], on_end: OnEnd[T]) -> None:
        """Run a coroutine on the loop. `on_end` is called once, on whatever thread, with its result or its error."""

        def ended(future: concurrent.futures.Future[T]) -> None:
            try:
                result: T | Exception = future.result()
            except concurrent.futures.CancelledError:
                result = HandshakeFailed(_CLOSED)
            except Exception as error:  # noqa: BLE001 - passed on
                result = error
            on_end(result)

        with self._lock:
            is_closing = self._is_closing
            if not is_closing:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if is_closing:
            coroutine.close()
            on_end(HandshakeFailed(_CLOSED))
        else:
            future.add_done_callback(ended)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call this on the loop; does nothing after `close`."""
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
        self._thread.join(limits.JOIN_S)

    # On the loop.

    async def describe(
        self,
        host: str,
        port: int,
        engine_id: str,
        client_id: str,
        timeout_s: float,
        *,
        queries_prompts: bool = False,
        waits: bool = True,
        keep: Callable[[Connection], None] | None = None,
    ) -> bytes:
        """As `fetch_description`, but the answer is left as it came.

        It may have megabytes, whose decoding would stop the loop: so `read_description` is the caller's, elsewhere.

        Args:
            keep: takes the connection over which the answer came; it is the caller's to close, when it has connected to
                the agents that are described. None for a caller that does not connect.
        """
        hello = Hello(
            engine_id=engine_id,
            client_id=client_id,
            queries_prompts=queries_prompts,
            connects=keep is not None,
        )
        return await self._exchange(
            host,
            port,
            lambda connection: ask_description(
                functools.partial(_ask, connection), hello
            ),
            MAX_PART_FRAME_BYTES,
            timeout_s,
            waits=waits,
            keep=keep,
        )

    async def connect(
        self, host: str, port: int, max_answer_bytes: int, *, waits: bool = False
    ) -> Connection:
        """Connect to a listener.

        Args:
            waits: whether to wait for a listener as long as there is none.

        Raises:
            NothingListens: there is none, and it does not wait.
            HandshakeFailed: there is no such host, or it is not allowed.
            PeerRefused: the secrets of both ends do not match.
        """
        # Every connection of this process to a side channel is made here, so this is the one place that judges hosts.
        address = await self._allowed_address(host)
        try:
            return await Connection.open(
                self._context,
                address,
                port,
                secrets=self._secrets,
                max_answer_bytes=max_answer_bytes,
                endless=self._endless,
                waits=waits,
            )
        except NothingListens as closed:
            raise NothingListens(f"{closed}{advice(host)}") from None
        except (zmq.ZMQError, ValueError) as refused:
            raise HandshakeFailed(f"cannot be connected: {refused}") from None

    async def _allowed_address(self, host: str) -> IpAddress:
        """The address to connect to.

        Raises:
            HandshakeFailed: there is no such host, or it is not allowed.
        """
        # Judged before the look-up, too: a client could otherwise make an engine look up any name.
        why = self._allowed.why_not(host)
        if why is not None:
            raise HandshakeFailed(why)
        # Looked up once. The address is judged and then connected, so no later answer of a name server counts.
        looked_up = await self._names.address(host)
        address = read_address(looked_up)
        if address is None:
            raise HandshakeFailed(f"has an address with a zone: {looked_up}")
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
        keep: Callable[[Connection], None] | None = None,
    ) -> bytes:
        where = host_port(host, port)
        attempts = self._attempt(
            host, port, converse, max_answer_bytes, waits=waits, keep=keep
        )
        try:
            return await within(timeout_s, attempts, advice(host))
        except PeerRefused as refused:
            raise PeerRefused(f"{where} cannot be connected: {refused}") from None
        except NothingListens as closed:
            raise NothingListens(f"{where} {closed}") from None
        except HandshakeFailed as failed:
            raise HandshakeFailed(f"{where} {failed}") from None

    async def _attempt(
        self,
        host: str,
        port: int,
        converse: Converse,
        max_answer_bytes: int,
        *,
        waits: bool,
        keep: Callable[[Connection], None] | None,
    ) -> bytes:
        for _ in range(limits.ATTEMPTS):
            connection = await self.connect(host, port, max_answer_bytes, waits=waits)
            with contextlib.ExitStack() as undo, contextlib.suppress(ConnectionEnded):
                undo.callback(connection.close)
                answer = await converse(connection)
                if keep is not None:
                    keep(connection)
                    undo.pop_all()
                return answer
        raise HandshakeFailed(f"ended {limits.ATTEMPTS} connections without an answer")

    def _run(self) -> None:
        try:
            # ZMQ starts its threads with the first socket: now, and not while the first message is to be sent.
            with contextlib.suppress(zmq.ZMQError):
                self._context.socket(zmq.PAIR).close(linger=0)
            self._loop.call_soon(self._endless.begin)
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_others())
            self._context.destroy()
            self._endless.close()
            self._loop.close()


async def _ask(connection: Connection, frame: bytes) -> bytes:
    connection.send(frame)
    return await connection.receive()


async def ask_description(ask: Ask, hello: Hello) -> bytes:
    """The frame of the listener's description, or of its refusal.

    Args:
        ask: sends a request over one connection, and returns the answer.

    Raises:
        ConnectionEnded: the connection has ended before.
        InvalidMessage: a part is not the one that comes next.
    """
    # In parts, each asked for by itself, so that a connection that brings more than one part can be ended.
    received = PartsReceived()
    while True:
        request = msgspec.structs.replace(hello, at=received.num_bytes)
        frame = received.take(await ask(encode(request)))
        if frame is not None:
            return frame


def read_description(frame: bytes, host: str, port: int) -> EngineDescription:
    """The description in an answer of the listener at this address.

    Raises:
        PeerRefused: it is a refusal.
        InvalidMessage: it is not one of the protocol's.
    """
    reply = decode_reply(frame)
    if isinstance(reply, EngineDescription):
        return reply
    why = refusal(reply)
    if reply.field == "engine_id":
        # Another engine answers there: perhaps one of this host, where that of another host was meant.
        why += advice(host)
    raise PeerRefused(f"{host_port(host, port)} {why}")


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop."""
    while True:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        # Then again, for those that are left: before Python 3.12 `wait_for` can swallow a cancellation.
        await asyncio.wait(others, timeout=limits.CANCEL_AGAIN_S)


def refusal(refused: Refused) -> str:
    """A listener's refusal, as text with control characters escaped."""
    field = _escaped(refused.field)
    value = _escaped(refused.value)
    expected = _escaped(refused.expected)
    return f"refused: {field} is {value}; expected {expected}"


def _escaped(text: str) -> str:
    return repr(text)[1:-1]
