"""The accuracy test's poisoned producer overwrites its cache in the step that holds a prompt, and in no other."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector import FerryConnector
from kvferry.connector.messages import FerryMetadata
from kvferry.protocol.orders import LeaseHold, Prewarm, StepOrders, encode_head, encode_orders
from scripts.accuracy.poison import NixlConnector

BOOT = "0" * 31 + "1"
HOLD = LeaseHold(request_id="r", slot=0, epoch="0" * 14 + "1")
PREWARM = Prewarm(host="10.0.0.1", port=5600, engine_id="p", boot=BOOT)


@pytest.mark.parametrize(
    ("orders", "poisoned"),
    [
        (StepOrders(boot=BOOT, holds=(HOLD,)), True),
        (StepOrders(boot=BOOT, prewarms=(PREWARM,)), False),
        (None, False),
    ],
    ids=["a hold", "no hold", "no orders"],
)
def test_the_cache_is_overwritten_when_a_prompt_is_held(
    monkeypatch: pytest.MonkeyPatch, orders: StepOrders | None, poisoned: bool
) -> None:
    bound: list[object] = []
    monkeypatch.setattr(FerryConnector, "register_kv_caches", lambda *_: None)
    monkeypatch.setattr(FerryConnector, "bind_connector_metadata", lambda _, metadata: bound.append(metadata))
    connector = object.__new__(NixlConnector)
    cache = torch.zeros(2, 8, 4)
    connector.register_kv_caches({"layer": cache})
    metadata = FerryMetadata(encode_head(orders), encode_orders(orders)) if orders is not None else FerryMetadata()
    connector.bind_connector_metadata(metadata)
    assert bool(cache.any()) is poisoned
    assert bound == [metadata]
