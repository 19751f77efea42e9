"""vLLM's allocator for sleep mode looks the CUDA runtime up among the libraries that are loaded, where NIXL's own copy
may come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def install(wrapper: Any) -> None:
    """Give it the stand-in, which torch uses."""
    packages = Path(torch.__file__).parents[1]
    runtime = packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    wrapper.find_loaded_library = lambda _name: str(runtime)
