"""The child of a listener: owns memory of known content for one client. `python -m kvferry.cli.bench.owner`."""

from __future__ import annotations

import secrets
import socket
import time

from kvferry.cli.bench.cases import content
from kvferry.cli.bench.memory import Memory, registered_memories
from kvferry.cli.bench.messages import Connected, Failed, Join, Offer, OfferedMemory, Task
from kvferry.cli.bench.pipe import Pipe, play
from kvferry.protocol.errors import KvferryError
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, FabricError, PeerAgent

MAX_ECHO_BYTES = 64
_POLL_S = 0.5e-3
_BUSY_S = 0.05
"""After a notification, poll for the next one without pauses for this long."""


def fill(memory: Memory, seed: int) -> None:
    """Write the content that the client expects."""
    memory.write(content(seed, memory.length))


def own(pipe: Pipe) -> None:
    """Offer the memory, connect to one client, and echo its notifications until the parent closes the pipe."""
    task = pipe.take()
    if not isinstance(task, Task):
        return
    fabric = NixlFabric(f"kvferry-bench-owner-{secrets.token_hex(8)}")
    memories, no_cuda = registered_memories(fabric, task.device, task.max_bytes)
    offered = []
    for memory in memories:
        seed = secrets.randbits(62)
        fill(memory, seed)
        offered.append(OfferedMemory(kind=memory.kind, address=memory.address, length=memory.length, seed=seed))
    host = socket.gethostname()[:256] or "unnamed"
    pipe.tell(Offer(host=host, agent_metadata=fabric.metadata(), memories=tuple(offered), no_cuda=no_cuda))
    _echo(fabric, _connect(fabric, pipe), pipe)


def _connect(fabric: Fabric, pipe: Pipe) -> PeerAgent:
    """Wait for the first client with valid metadata."""
    while True:
        asked = pipe.take()
        if isinstance(asked, Join):
            try:
                peer = fabric.add_peer(asked.agent_metadata)
            except KvferryError as refused:
                pipe.tell(Failed(reason=str(refused)))
            else:
                pipe.tell(Connected())
                return peer


def _echo(fabric: Fabric, peer: PeerAgent, pipe: Pipe) -> None:
    """Echo notifications until `ParentGone` is raised."""
    busy_until_s = 0.0
    while True:
        pipe.take(0.0 if time.monotonic() < busy_until_s else _POLL_S)
        for sender, message in fabric.take_notifications():
            if sender == peer and len(message) <= MAX_ECHO_BYTES:
                busy_until_s = time.monotonic() + _BUSY_S
                try:
                    fabric.notify(peer, message)
                except FabricError as lost:
                    pipe.tell(Failed(reason=str(lost)))


if __name__ == "__main__":
    raise SystemExit(play(own))
