"""Prefill context parallelism: ranks share out the tokens of a prompt, and each keeps all of its cache.

- `partition`: who computes which tokens of a step; a frozen value, made by a pure function.
- `manager`: the collectives that bring the results of all ranks back into order, with their buffers.
- `compatibility`: which attention backends cannot do it, by name.
"""
