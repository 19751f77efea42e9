"""Registers the name in `"kv_connector": "FerryConnector"`: an entry point of `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Register the class. vLLM calls this at least once in every process; it must not raise."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "FerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "FerryConnector", "kvferry.connector", "FerryConnector"
        )
