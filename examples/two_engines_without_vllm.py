"""Two engines without vLLM: one process computes the KV cache of a prompt, the other reads it over NIXL.

    pip install '.[worker]' && python examples/two_engines_without_vllm.py

The producer's blocks hold 16 tokens, head by head; the consumer's hold 8, token by token. kvferry plans the reads from
both descriptions, and puts bytes in place where the layouts differ. A pipe stands in for the router.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import torch

from kvferry.connector.standalone import StandaloneEngine
from kvferry.protocol.digests import Prompt
from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import CacheGroup, ModelFacts
from kvferry.worker.caches import KvCaches

PROMPT = Prompt(tokens=range(100))
HEADS, SIZE = 4, 32
MODEL = ModelFacts(
    model="toy",
    fingerprint="toy-1",
    dtype="float32",
    cache_dtype="auto",
    quantization="none",
    max_model_tokens=512,
)


def engine(name: str, k: torch.Tensor, v: torch.Tensor) -> StandaloneEngine:
    """An engine of one worker and one layer; `k` and `v` are `[blocks, heads, tokens, size]`."""
    caches = KvCaches.from_views({("layers.0", "k"): k, ("layers.0", "v"): v})
    group = CacheGroup(policy="full", block_tokens=k.shape[2])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return StandaloneEngine(name, [(Place(), caches)], (group,), MODEL, port=port)


def prompt_of(cache: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """`[heads, tokens, size]` of the prompt in these blocks."""
    return cache[list(blocks)].transpose(0, 1).flatten(1, 2)[:, : len(PROMPT.tokens)]


def produce(router: Connection) -> None:
    """Prefill: compute the prompt, offer its blocks, and keep them until the other engine has read them."""
    k, v = torch.zeros(2, 64, HEADS, 16, SIZE)
    producer, blocks = engine("producer", k, v), (7, 3, 21, 5, 50, 11, 2)
    producer.leases.open("prefill")
    producer.step(compute=lambda: (k.normal_(), v.normal_()))
    params = producer.offer("prefill", (blocks,), PROMPT)
    producer.step()
    router.send((params, prompt_of(k, blocks), prompt_of(v, blocks)))
    while "prefill" not in producer.step().sent:
        time.sleep(0.001)
    print("producer: the prompt was read, its blocks are free")
    producer.close()


def main() -> None:
    """Decode: load the prompt into other blocks of another layout, and compare every byte."""
    spawn = multiprocessing.get_context("spawn")
    router, other_end = spawn.Pipe()
    prefill = spawn.Process(target=produce, args=(other_end,), daemon=True)
    prefill.start()
    k, v = torch.zeros(2, 128, 8, HEADS, SIZE).transpose(2, 3)
    consumer, blocks = engine("consumer", k, v), tuple(range(60, 73))
    params, *expected = router.recv()
    count = consumer.start_load("decode", params, PROMPT, (blocks,))
    while not ((ended := consumer.step()).loaded or ended.failed):
        time.sleep(0.001)
    equal = all(
        torch.equal(prompt_of(cache, blocks), wanted)
        for cache, wanted in zip((k, v), expected, strict=True)
    )
    print(
        f"consumer: {count} tokens, failed: {ended.failed or 'no'}, every byte is equal: {equal}",
        flush=True,
    )
    prefill.join()
    consumer.close()
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
