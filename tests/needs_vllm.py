"""Folders whose tests use vLLM, which is optional for the rest of the project: without it they are left out.

Its import, and torch's under it, raise warnings that are not ours to fix: they are named here, and everything else
still fails a test.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
LEFT_OUT = [] if HAS_VLLM else ["test_*.py"]
"""A folder's `collect_ignore_glob`."""

_NOT_OURS = (
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
)


def import_quietly(config: pytest.Config, *modules: str) -> None:
    """Import what a folder uses of vLLM, before its tests, which fail for any warning."""
    for line in _NOT_OURS:
        config.addinivalue_line("filterwarnings", line)
    if not HAS_VLLM:
        return
    logging.getLogger("vllm").setLevel(
        logging.ERROR
    )  # until its own configuration takes over
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for module in modules:
            importlib.import_module(module)
