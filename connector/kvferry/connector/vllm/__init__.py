"""The adapter to vLLM's internals: what kvferry uses of vLLM beyond its API for connectors.

Nothing else in this package imports `vllm.v1` at run time or reads a private attribute of vLLM
(`tests/connector/test_vllm_adapter.py`). So a new release of vLLM is compared with these files only.

| file | what | without it |
| --- | --- | --- |
| `version.py` | the version | the start ends, unless `KVFERRY_ALLOW_VLLM` names it |
| `scheduler.py` | references on blocks of the pool (`EngineBlocks`) | the start ends |
| `attention.py` | the CPU backend's packing of keys, on that backend | the start ends |
| `scheduler.py` | the status of a request | the start ends |
| `scheduler.py` | a status of waiting requests that are skipped (`park`) | every step costs more |
| `scheduler.py` | the tokens of a prompt whose last ones are left out | such a prompt is computed twice |
| `scheduler.py` | a request's count of cached tokens | with both legs at once, usage is the decoder's |
| `scheduler.py` | the number of blocks that a request lacks | leases are not evicted |
| `prefix_cache.py` | look-ups in the prefix cache, hashes of its blocks | no other engine reads prefixes from here |
| `core.py` | the engine's loop (`EngineLoop`) | an idle engine is not woken, and no pause is seen |
| `core.py` | the weights' version, calls that change them | updated ones are taken for those of the start |
| `core.py` | resets of the prefix cache that preempt requests (`CacheResets`) | they fail while blocks are leased |
| `sleep.py` | the backend of sleep mode, with sleep mode or its allocator | the start ends |
| `sleep.py` | the executor's sleep and wake-up, with the same | the start ends |
| `model_config.py` | a model's configuration as vLLM reads it | the one in memory is compared |

What can end the start is tried at the start: the version when the class is loaded, the pool when vLLM binds its KV
cache manager, the packing when it registers its caches. The rest is tried when it is first needed, and its lack is
logged once.

Line numbers in comments are those of vLLM 0.32.0.
"""
