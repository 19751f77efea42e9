"""Makes `"kv_connector": "FerryConnector"` known to vLLM by name: an entry point of `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Register the class; vLLM calls this in every process, once or more, and expects it not to raise."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "FerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("FerryConnector", "kvferry.connector", "FerryConnector")
