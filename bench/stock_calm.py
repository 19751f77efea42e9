"""vLLM's own NixlConnector, with NIXL's progress thread event-driven and the worker where the scheduler puts it.

As shipped, the thread takes a whole core and every worker pins itself to the last one, so that on two cores a prompt
takes half a minute. Nothing of what the connector says, reads or decides is different here. As
`kv_connector_module_path` it is loaded in every process of an engine.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvferry.worker.fabric.nixl import PROGRESS_INTERVAL_US, load_bindings

__all__ = ["NixlConnector"]

_bindings: Any = load_bindings()
_make_agent = _bindings.nixlAgent


def _make_calm_agent(name: str, config: Any) -> Any:
    config.pthrDelay = PROGRESS_INTERVAL_US
    return _make_agent(name, config)


_bindings.nixlAgent = _make_calm_agent
os.sched_setaffinity = lambda pid, cores: None
