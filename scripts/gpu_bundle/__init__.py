"""The GPU check for a machine without a package index: `scripts/gpu_bundle.sh DEST` (docs/gpu-check.md).

`packages` says what is carried, of requirements/cuda.lock, and brings the wheels; `fatbin` and `slim` take out of them
what that machine cannot use; `pieces` packs and cuts into folders of a limited size. `unpack` and `run.sh` are copied
to DEST and run over there: they need Python's standard library only.
"""
