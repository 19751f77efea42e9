"""Engines for tests and benchmarks that have no model, or a toy one.

An engine without a model (no vLLM): `cache_engine` puts the parts of kvferry together, `engine` adds caches and blocks
for one worker, `rig` steps several of them; `process` runs them in child processes. Their fabrics go wrong on demand:
`fault_fabric`, `gates`.
"""
