"""An owner without NIXL, for tests of the listener: it accepts readers, refuses `refuse` and dies of `crash`."""

from __future__ import annotations

import os

import msgspec

from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.messages import Connect, Offer, OfferedMemory, ReadsFailed

MEMORY = OfferedMemory(kind="DRAM", address=4096, length=4096, seed=1)
OFFER = Offer(host="p0", agent_metadata=b"m", memories=(MEMORY,), no_cuda="")


def own(pipe: Pipe) -> None:
    """Offers memory that does not exist; its process id is its host."""
    pipe.take()
    pipe.send(msgspec.structs.replace(OFFER, host=str(os.getpid())))
    asked = pipe.take()
    assert isinstance(asked, Connect)
    if asked.agent_metadata == b"crash":
        os.abort()
    if asked.agent_metadata == b"refuse":
        raise ReadsFailed("no such metadata")
    pipe.take()


if __name__ == "__main__":
    raise SystemExit(play(own))
