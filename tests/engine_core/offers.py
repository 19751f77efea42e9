"""Params as a producer would have written them, and a producer's side channel that only listens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import zmq

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.handshake import Release, Renew, decode_request
from kvferry.protocol.ids import epoch_to_text, new_boot_id, new_epoch
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import new_mac_key, sign_params
from tests.harness.core.scheduler import BLOCK_TOKENS


def offer(prompt: Sequence[int], *, port: int = 9, slot: int = 0, lease_s: float = 30.0, **flat: Any) -> dict[str, Any]:
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
    """A side channel that answers nothing and records its messages."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 50)
        self._stopping = False
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._changed = threading.Condition()
        self._received: list[Renew | Release] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def released(self, count: int = 1, timeout_s: float = 30.0) -> list[int]:
        """The released slots, in order; waits until there are `count` of them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._slots(Release)) >= count, timeout_s)
            return self._slots(Release)

    def renewed(self, timeout_s: float = 30.0) -> bool:
        """Whether any lease was renewed."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._slots(Renew)), timeout_s)

    def close(self) -> None:
        self._stopping = True
        self._thread.join(5.0)
        self._context.destroy(linger=0)

    def _slots(self, kind: type[Renew] | type[Release]) -> list[int]:
        return [name.slot for message in self._received if isinstance(message, kind) for name in message.leases]

    def _listen(self) -> None:
        while not self._stopping:
            try:
                _, _, body = self._socket.recv_multipart()
            except zmq.Again:
                continue
            message = decode_request(body)
            if isinstance(message, (Renew, Release)):
                with self._changed:
                    self._received.append(message)
                    self._changed.notify_all()
        self._socket.close()
