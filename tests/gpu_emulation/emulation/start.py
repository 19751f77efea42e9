"""Imported by every Python of the environment before anything else: from here on there is a GPU.

Modules are changed when they have been imported, so that a Python that needs none of them starts as quickly as ever.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_CHANGES = {
    "torch": "aten",
    "vllm._custom_ops": "vllm_ops",
    "vllm.platforms.cuda": "collectives",
    "vllm.distributed.device_communicators.cuda_wrapper": "cuda_runtime",
    "vllm.vllm_flash_attn.flash_attn_interface": "flash_attention",
    "vllm.third_party.flash_linear_attention.ops.op": "flash_linear_attention",
    "triton.runtime.interpreter": "triton_interpreter",
    "nixl_cu12._bindings": "nixl_memory",
    "nixl_cu13._bindings": "nixl_memory",
}
"""By module the one of this package whose `install` is called with it after its import."""

_SETTINGS = {
    "TRITON_INTERPRET": "1",
    # vLLM takes flashinfer for granted on Hopper; it is not installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_COMPILE_DISABLE": "1",
    # Ranks of an engine exchange by Gloo (collectives.py): of vLLM's own ways each has kernels of NVIDIA's.
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # UCX would ask libcuda what memory is, and find functions there that the stand-in lacks.
    "UCX_MODULES": "^cuda,gda",
    "OMP_NUM_THREADS": "1",
    # Counting GPUs by the runtime would forbid torch the device in processes that are forked later.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the others do, and has `install` called when one of them has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec and spec.loader:
                spec.loader = _Loader(spec.loader, _CHANGES[name])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, own: importlib.abc.Loader, change: str) -> None:
        self._own = own
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        importlib.import_module(
            f"tests.gpu_emulation.emulation.{self._change}"
        ).install(module)


def note_launches() -> None:
    """Have launches noted in the folder of a part of the GPU check."""
    _CHANGES["tests.gpu_emulation.emulation.graphs"] = "launches"


def _start() -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return  # nothing here needs a GPU
    libraries = Path(torch.origin).parents[1] / "nvidia" / "cu13" / "lib"
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        # A library that is loaded is found under its own name by all who look for it later.
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(libraries))
    sys.meta_path.insert(0, _AfterImport())


_start()
