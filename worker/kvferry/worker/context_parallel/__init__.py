"""Prefill context parallelism: the tokens of a prompt are divided among ranks, and each rank keeps all of its cache.

- `partition`: which rank computes which tokens of a step; a frozen value, made by a pure function.
- `manager`: the collectives that bring the results of all ranks back into order, with their buffers.

Attention backends that do not support it are refused by `kvferry.connector.context_parallel`.
"""
