"""Exchanges between the ranks of an engine: by Gloo, which copies device tensors through the host, not by NCCL."""

from __future__ import annotations

from types import ModuleType


def install(platform: ModuleType) -> None:
    """Have vLLM make its groups of processes of Gloo."""
    platform.CudaPlatformBase.dist_backend = "gloo"
