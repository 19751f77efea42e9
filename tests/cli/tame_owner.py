"""An owner without NIXL, for tests of the listener: it accepts clients, refuses `refuse`, dies of `crash`, and hangs at
`hang`."""

from __future__ import annotations

import os
import time

from kvferry.cli.bench.messages import Connected, Failed, Join, Offer, OfferedMemory
from kvferry.cli.bench.pipe import Pipe, play

MEMORY = OfferedMemory(kind="DRAM", address=4096, length=4096, seed=1)


def own(pipe: Pipe) -> None:
    """Offers memory that does not exist; its process id is its host."""
    pipe.take()
    pipe.tell(Offer(host=str(os.getpid()), agent_metadata=b"m", memories=(MEMORY,), no_cuda=""))
    while True:
        asked = pipe.take()
        if isinstance(asked, Join):
            if asked.agent_metadata == b"crash":
                os.abort()
            if asked.agent_metadata == b"hang":
                time.sleep(3600)
            refused = asked.agent_metadata == b"refuse"
            pipe.tell(Failed(reason="no metadata") if refused else Connected())


if __name__ == "__main__":
    raise SystemExit(play(own))
