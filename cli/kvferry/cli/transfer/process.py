"""The child process, an owner or a reader: `python -m kvferry.cli.transfer.process`.

Both register memory of known content first. The message that follows makes it an owner, which echoes notifications, or
a reader, which does the rest.
"""

from __future__ import annotations

import secrets
import socket
import time

from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.memory import content, registered_memories
from kvferry.cli.transfer.messages import Connect, Offer, OfferedMemory, Task
from kvferry.cli.transfer.reader import read_all
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, PeerAgent

MAX_ECHO_BYTES = 64
_POLL_S = 0.5e-3
_BUSY_S = 0.05
"""After a notification, poll for the next one without pauses for this long."""


def run(pipe: Pipe) -> None:
    """Offer memory, then read or be read until the command closes the pipe."""
    task = pipe.take()
    if not isinstance(task, Task):
        return
    fabric = NixlFabric(f"kvferry-bench-{secrets.token_hex(8)}")
    memories, no_cuda = registered_memories(fabric, task.device, task.max_bytes)
    offered = []
    for memory in memories:
        seed = secrets.randbits(62)
        memory.write(content(seed, memory.length))
        offered.append(OfferedMemory(kind=memory.kind, address=memory.address, length=memory.length, seed=seed))
    mine = Offer(
        host=socket.gethostname()[:256] or "unnamed",
        agent_metadata=fabric.metadata(),
        memories=tuple(offered),
        no_cuda=no_cuda,
    )
    pipe.send(mine)
    asked = pipe.take()
    if isinstance(asked, Offer):
        read_all(pipe, task, fabric, memories, asked)
    elif isinstance(asked, Connect):
        _echo(fabric, fabric.add_peer(asked.agent_metadata), pipe)
    fabric.close()


def _echo(fabric: Fabric, peer: PeerAgent, pipe: Pipe) -> None:
    """Echo notifications until the pipe is closed, which raises `EOFError`."""
    busy_until_s = 0.0
    while True:
        pipe.take(0.0 if time.monotonic() < busy_until_s else _POLL_S)
        for sender, message in fabric.take_notifications():
            if sender == peer and len(message) <= MAX_ECHO_BYTES:
                busy_until_s = time.monotonic() + _BUSY_S
                fabric.notify(peer, message)


if __name__ == "__main__":
    raise SystemExit(play(run))
