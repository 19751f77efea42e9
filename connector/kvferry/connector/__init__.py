"""The connector classes that `--kv-transfer-config` names.

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.connector", "kv_role": "kv_producer"}

Both names are one class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.connector.connector import FerryConnector

    NixlConnector = FerryConnector

__all__ = ["FerryConnector", "NixlConnector"]


def __getattr__(name: str) -> Any:
    # On first use: vLLM's plugin loader imports this package in every process, and that must cost nothing.
    if name in __all__:
        from kvferry.connector.vllm.version import check_vllm_version

        check_vllm_version()
        from kvferry.connector.connector import FerryConnector

        return FerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
