"""Owners for tests: a tame one without NIXL, which refuses `refuse` and dies of `crash`; a lying one."""

from __future__ import annotations

import os
import sys

import msgspec

from kvferry.cli.transfer.child import Pipe, play
from kvferry.cli.transfer.messages import (
    CaseResult,
    Connect,
    ReadableAgent,
    ReadsFailed,
)

OFFER = ReadableAgent(
    host="p0", agent_metadata=b"m", kind="DRAM", address=4096, length=4096, seed=1
)
READS = CaseResult(
    kind="DRAM",
    num_bytes=65536,
    descriptors=4,
    reads=9,
    p50_us=32.768,
    p99_us=123.4,
    checked=786432,
    wrong=0,
    first_wrong=-1,
)
"""Of a reader of this memory, for tests of reports."""


_BEGIN = """
import os, signal, sys
from multiprocessing.connection import Connection
from msgspec.structs import replace
from kvferry.cli.transfer.child import Pipe
from kvferry.cli.transfer.messages import CaseProgress, Failed
from tests.cli.owners import OFFER
pipe = Pipe(Connection(int(sys.argv[-1])))
pipe.take()
"""


def scripted(code: str) -> tuple[str, str]:
    """Arguments of Python for an owner or a reader that runs this code once it has its task, in place of NIXL."""
    return ("-c", _BEGIN + code)


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


CHANGED = 9000


def lie(pipe: Pipe) -> None:
    """An owner on NIXL, with one bit of its memory changed."""
    from kvferry.cli.transfer import process
    from kvferry.cli.transfer.process import Bytes, content

    def changed_content(seed: int, length: int) -> Bytes:
        right = content(seed, length)
        right[CHANGED] ^= 1
        return right

    vars(process)["content"] = changed_content
    process.run(pipe)


if __name__ == "__main__":
    raise SystemExit(play(lie if "lying" in sys.argv else own))
