"""A store beside kvferry under MultiConnector: it loads within the step, and a test says which of its loads fail.

    shelf = Shelf()
    producer = Node("kv_producer", **beside_a_store(shelf), max_step_tokens=64)
    shelf.serve(producer)
    shelf.tokens["p"] = 64           # the store has this many leading tokens of request p
    shelf.broken.add("p")            # and its load leaves the blocks as they are, and reports them

vLLM schedules the first step of such a request as if the tokens were there. It learns from that step's output that they
are not, and takes them back (`kv_load_failure_policy: recompute`), or fails the request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.harness.core.configs import BLOCK_TOKENS
from tests.harness.core.toy_model import states_of

_SHELVES: dict[str, Shelf] = {}
_NAMES = map("shelf{}".format, itertools.count())


@dataclass
class Shelf:
    """The content of one engine's store.

    Attributes:
        tokens: by request, the leading tokens that it has.
        broken: requests whose loads fail.
        late: whether failed blocks are reported one step after the load, which vLLM's contract does not allow.
        loads: the requests of all loads so far.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    late: bool = False
    loads: list[str] = field(default_factory=list)
    node: Any = None
    name: str = field(default_factory=lambda: next(_NAMES))

    def __post_init__(self) -> None:
        _SHELVES[self.name] = self

    def serve(self, node: Any) -> None:
        """Take the engine into whose caches it loads."""
        self.node = node

    def fill(self, load: Load) -> None:
        """Write what the model would have written."""
        prompt = self.node.engine.scheduler.requests[load.request_id].all_token_ids
        states = states_of(prompt[: load.stop], self.node.window)
        for layer, table in enumerate(load.tables):
            self.node.model.write_states(
                layer, list(table), load.start, states[load.start :]
            )


@dataclass(frozen=True)
class Load:
    """Tokens `[start, stop)` of a request go into the blocks of its tables, one a cache group."""

    request_id: str
    start: int
    stop: int
    tables: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those of the first group: vLLM takes a report of blocks only where there is one."""
        return self.tables[0][
            self.start // BLOCK_TOKENS : -(-self.stop // BLOCK_TOKENS)
        ]


@dataclass
class StoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The loads of one step."""

    loads: list[Load] = field(default_factory=list)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads what the shelf has, within the step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._shelf = _SHELVES[
            vllm_config.kv_transfer_config.kv_connector_extra_config["shelf"]
        ]
        self._ordered: list[Load] = []
        self._invalid: list[set[int]] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        has = min(self._shelf.tokens.get(request.request_id, 0), request.num_tokens - 1)
        return max(0, has - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            stop = min(self._shelf.tokens[request.request_id], request.num_tokens - 1)
            tables = tuple(map(tuple, blocks.get_block_ids()))
            self._ordered.append(
                Load(request.request_id, stop - num_external_tokens, stop, tables)
            )

    def build_connector_meta(self, scheduler_output: Any) -> StoreMetadata:
        ordered = self._ordered
        self._ordered = []
        return StoreMetadata(ordered)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        invalid: set[int] = set()
        for load in self._get_connector_metadata().loads:
            self._shelf.loads.append(load.request_id)
            if load.request_id in self._shelf.broken:
                invalid |= set(load.blocks)
            else:
                self._shelf.fill(load)
        self._invalid.append(invalid)

    def get_block_ids_with_load_errors(self) -> set[int]:
        reported = self._invalid if not self._shelf.late else self._invalid[:-1]
        self._invalid = self._invalid[len(reported) :]
        return set().union(*reported)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """It has none; by default a connector refuses several stages."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The node's model writes them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over when they have begun."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is stored."""

    def wait_for_save(self) -> None:
        """Nothing is stored."""


def beside_a_store(
    shelf: Shelf, role: str = "kv_producer", policy: str = "recompute", **extra: Any
) -> dict[str, Any]:
    """The configuration of a node with both as children of MultiConnector."""
    ferry = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvferry.connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"handshake_timeout_s": 30.0, **extra},
    }
    store = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shelf": shelf.name},
    }
    return {
        "connector": "MultiConnector",
        "module": None,
        "policy": policy,
        "extra": {"connectors": [ferry, store]},
    }
