"""Child processes for tests: scripts in place of those that use NIXL, and an owner that lies."""

from __future__ import annotations

from kvferry.cli.transfer.messages import CaseResult, Offer

OFFER = Offer(
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
    gb_s=2.0,
)
"""Of a reader of this memory, for tests of reports."""

_BEGIN = """
import os, signal, sys, time
from multiprocessing.connection import Connection
from kvferry.cli.transfer.messages import Failed, CaseProgress, receive, send
from tests.cli.owners import OFFER
pipe = Connection(int(sys.argv[-1]))
task = receive(pipe)
"""


def scripted(code: str) -> tuple[str, str]:
    """Arguments of Python for a child that runs this code once it has its task."""
    return ("-c", _BEGIN + code)


TAME = scripted("send(pipe, OFFER); receive(pipe)")
"""An owner of memory that does not exist."""
