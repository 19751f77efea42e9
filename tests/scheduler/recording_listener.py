"""A listener that keeps whole messages, for tests of what is sent over the side channel."""

from __future__ import annotations

import queue

from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.side_channel.inbox import LeaseInbox, LeaseMessage
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters


class MessageInbox(LeaseInbox):
    """First in, first out; nothing is merged or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: queue.SimpleQueue[LeaseMessage] = queue.SimpleQueue()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        self._messages.put(message)
        return True

    def get(self, timeout: float = 0.0) -> LeaseMessage:
        """The oldest. Raises `queue.Empty` after `timeout` seconds."""
        return self._messages.get(timeout=timeout) if timeout else self._messages.get_nowait()

    def qsize(self) -> int:
        return self._messages.qsize()

    def empty(self) -> bool:
        return self._messages.empty()


class RecordingListener(SideChannelListener):
    """Its inbox gives whole messages."""

    inbox: MessageInbox

    def __init__(self, host: str, port: int, counters: Counters, secrets: Secrets = ()) -> None:
        super().__init__(host, port, counters, secrets)
        self.inbox = MessageInbox()
