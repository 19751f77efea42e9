"""Registers the name in `"kv_connector": "FerryConnector"`: an entry point of `vllm.general_plugins`."""

from __future__ import annotations

import contextlib


def register() -> None:
    """Register the class. vLLM calls this at least once in every process; it must not raise."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The second call in a process: vLLM refuses a name that is registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(
            "FerryConnector", "kvferry.connector", "FerryConnector"
        )
