"""The other process of a test: `fabric_producer.py NAME SEED SIZE` registers random bytes and serves them.

Prints one JSON line with its metadata (hex) and the address of the bytes, then one for each notification it gets. A
line `METADATA MESSAGE` (hex) on stdin makes it notify that agent; the end of stdin ends it.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from typing import TextIO

import numpy as np

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import MemoryKind, Region


def main(name: str, seed: int, size: int, answers: TextIO) -> None:
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    fabric = NixlFabric(name)
    fabric.register([Region(content.ctypes.data, content.nbytes, MemoryKind.DRAM)])
    print(
        json.dumps({"metadata": fabric.metadata().hex(), "address": str(content.ctypes.data)}), file=answers, flush=True
    )
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.001):
                line = sys.stdin.readline()
                if not line:
                    break
                metadata, message = line.rstrip("\n").split(" ")
                fabric.notify(fabric.add_peer(bytes.fromhex(metadata)), bytes.fromhex(message))
            for sender, arrived in fabric.take_notifications():
                print(json.dumps({"sender": sender, "message": arrived.hex()}), file=answers, flush=True)
    fabric.close()


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), answers)
