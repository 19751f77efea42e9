"""Engines for tests and benchmarks, without a model or with a toy one.

Without a model and without vLLM: `cache_engine` puts the parts of kvferry together, and what its workers report is
joined in `seen`; `engine` adds `caches` and blocks for one worker; `rig` steps several engines; `handover` hands one
prompt over between engines of any shape. `process` has engines in processes of their own (`child` is the other end,
`children` any process). Fabrics go wrong on demand: `fault_fabric`, `gates`. With vLLM's scheduler: `core`.
"""
