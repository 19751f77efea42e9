"""Params as a producer would have written them, and a producer's side channel that only listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.link.counters import Counters
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.handshake import Release
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.params import RemotePrefill, Ticket, new_mac_key, sign_params
from kvferry.protocol.slots import epoch_to_text, new_epoch
from tests.harness.core.scheduler import BLOCK_TOKENS
from tests.link.channel import HOST, RecordingListener
from tests.ports import free_port


def offer(
    prompt: Sequence[int],
    *,
    port: int = 9,
    slot: int = 0,
    lease_s: float = 30.0,
    **flat: Any,
) -> dict[str, Any]:
    """`kv_transfer_params` of a prompt that some producer has prefilled, as plain JSON objects."""
    count = -(-len(prompt) // BLOCK_TOKENS)
    ticket = Ticket(
        version=1,
        boot=new_boot_id(),
        lease_slot=slot,
        lease_epoch=epoch_to_text(new_epoch()),
        lease_s=lease_s,
        digests=digest_chain(Prompt(tokens=list(prompt))),
        mac="0" * 64,
    )
    values: dict[str, Any] = {
        "remote_engine_id": "producer",
        "remote_request_id": "p",
        "remote_block_ids": (tuple(range(1, count + 1)),),
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "remote_num_tokens": len(prompt),
        **flat,
    }
    return sign_params(RemotePrefill(**values, kvferry=ticket), new_mac_key()).to_json()


class Eavesdropper:
    """A side channel without an engine that records the released slots."""

    def __init__(self) -> None:
        self.port = free_port()
        self._listener = RecordingListener(HOST, self.port, Counters())
        self._released: list[int] = []
        self.close = self._listener.close

    def released(self) -> list[int]:
        """The slots, in order; waits until there is one. Raises `queue.Empty` after 30 s without a message."""
        while not self._released or not self._listener.inbox.empty():
            message = self._listener.inbox.get(timeout=30.0)
            if isinstance(message, Release):
                self._released += [name.slot for name in message.leases]
        return self._released
