"""`kv_connector_extra_config`, parsed once into a frozen value.

All keys of vLLM's NixlConnector are accepted, so that a deployment changes one key to change connectors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvferry.connector.config_values import (
    addresses,
    choice,
    fraction,
    hosts,
    name,
    number,
    path,
    plugins,
    pool_size,
    sources,
    whole,
    yes_or_no,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.plan.cost import DIRECT_MIN_BYTES
from kvferry.protocol.errors import InvalidConfig, one_of, shorten
from kvferry.protocol.hosts import address_of
from kvferry.protocol.params import SHORTEST_LEASE_S
from kvferry.trace.recorder import DEFAULT_BYTES, SMALLEST_BYTES
from kvferry.worker.fabric.ucx_settings import FAILED_READ_GRACE_S

MAX_PEER_LABELS = 1024
"""Upper limit of `max_peer_labels`; the front end creates no more labels, whatever workers report."""

logger = logging.getLogger(__name__)

STOCK_NAME = "NixlConnector"
"""The name of vLLM's own connector. Under it, the keys of a configuration made for that connector are accepted."""


def _option(
    default: object,
    check: Callable[[str, Any], object],
    doc: str,
    *,
    peer: bool = False,
) -> Any:
    """An option's field.

    Args:
        check: see `config_values`.
        peer: whether vLLM's NixlConnector has this key.
    """
    return field(default=default, metadata={"check": check, "doc": doc, "peer": peer})


@dataclass(frozen=True, slots=True)
class FerryConfig:
    """All options of an operator. Each field's metadata has its check and its documentation."""

    backends: tuple[str, ...] = _option(
        ("UCX",), plugins, "NIXL plugins, in order of preference", peer=True
    )
    num_threads: int = _option(
        0, whole(0, 64), "extra threads of NIXL's UCX backend; 0: none", peer=True
    )
    kv_lease_duration: float = _option(
        30.0,
        number(SHORTEST_LEASE_S, 86400),
        "seconds that a producer holds a finished prompt's blocks without a message from a consumer",
        peer=True,
    )
    bidirectional_kv_xfer: bool = _option(
        False,
        yes_or_no,
        "whether decoders offer their answers' blocks to the prefill of the conversation's next turn; set it on both "
        "engines",
        peer=True,
    )
    decoder_kv_blocks_ttl: float = _option(
        480.0,
        number(SHORTEST_LEASE_S, 86400 * 7),
        "seconds that a decoder holds an answer's blocks for the next turn",
        peer=True,
    )
    kv_recompute_threshold: int = _option(
        64,
        whole(0, 1 << 30),
        "the prefiller reads the last turn from the decoder if at least this many tokens of it are missing, and "
        "computes fewer",
        peer=True,
    )
    streaming: str = _option(
        "auto",
        choice("auto", "off"),
        "`auto`: routers may send both legs of a request at once, and decoders read a prompt while it is prefilled, "
        "once a decoder that can do so has connected; `off`: never",
    )
    prefix_pulls: str = _option(
        "auto",
        choice("auto", "off"),
        "`auto`: the first part of a prompt is read from another engine's cache where a request or `prefix_sources` "
        "names that engine, and other engines may read such parts from here; `off`: neither",
    )
    prefix_sources: tuple[str, ...] = _option(
        (),
        sources,
        'side channels of at most 8 engines, e.g. `["10.1.2.3:5600"]`, all of which are asked for the first part of '
        "each prompt whose request names no source; each such prompt waits for one round trip",
    )
    prefix_pull_min_tokens: int | None = _option(
        None,
        whole(1, 1 << 30),
        "the first part of a prompt is read from another engine if at least this many tokens are missing; default: if "
        "reading is estimated to be faster than computing, from measured speeds",
    )
    lease_slots: int = _option(
        0,
        whole(0, 1 << 20),
        "leases that can be open at once; 0: 4 × max_num_seqs, at least 1024",
    )
    max_leased_fraction: float = _option(
        0.875,
        fraction,
        "fraction of the cache's blocks that held leases alone may keep; above it leases are evicted, unclaimed ones "
        "first, then the oldest; the default leaves an eighth of the cache for prompts to be prefilled",
    )
    engine_ttl: float = _option(
        3600.0,
        number(-86400 * 365, 86400 * 365),
        "seconds without a read after which a producer is forgotten, with its plan and tables; 0 or less: never",
        peer=True,
    )
    max_peers: int = _option(
        1024,
        whole(1, 1 << 20),
        "producers that a worker keeps connected; above it the least recently used one is forgotten, never one that is "
        "being read from",
    )
    handshake_timeout_s: float = _option(
        5.0,
        number(0.1, 600),
        "seconds within which a producer must send its description, and again within which the first read must end",
    )
    load_timeout_s: float = _option(
        60.0,
        number(0.1, 3600),
        "seconds without progress after which a load fails; 20 times as long after its order (20 minutes) it fails "
        "whatever its progress",
    )
    failed_read_grace_s: float = _option(
        FAILED_READ_GRACE_S,
        number(0, 86400),
        "seconds that blocks stay out of use after a failed read from a producer that is alive, since data may still "
        "arrive",
    )
    max_loads: int = _option(
        1024, whole(1, 1 << 16), "loads in flight at once, per worker"
    )
    staging_pool_bytes: int | None = _option(
        None,
        pool_size,
        "bytes of each worker's staging pool, through which short runs are read; 0: no pool; default: 256 MiB on a "
        "GPU, 64 MiB elsewhere",
    )
    direct_min_bytes: int = _option(
        DIRECT_MIN_BYTES,
        whole(1, 1 << 40),
        "bytes of a run from which it is read straight into the cache",
    )
    mapped_reads: str = _option(
        "auto",
        choice("auto", "cuda_ipc", "off"),
        "`auto`: a consumer maps the cache of a producer on the same host and copies from it without NIXL, where that "
        "cache lies in shared host memory (vLLM's own caches do not); `cuda_ipc`, on both engines: also where it lies "
        "on a GPU, which has never run on one; `off`, on either engine: never",
    )
    max_peer_labels: int = _option(
        32,
        whole(0, MAX_PEER_LABELS),
        "number of producers that metrics name in the label `peer`; all others are `other`",
    )
    allowed_hosts: tuple[str, ...] | None = _option(
        None,
        hosts,
        'hosts that this engine may connect to, as params spell them, e.g. `["10.1.0.0/16", "*.prefill.example"]`; '
        'default: with a secret any host, without one only this host; `["*"]`: any host, and clients must be trusted; '
        "see docs/protocol.md",
    )
    prewarm_peers: tuple[str, ...] = _option(
        (),
        addresses,
        'side channels of producers, e.g. `["10.1.2.3:5600"]`, with which a consumer does the handshake at its start '
        "and after they restart, so that no request waits for it; hosts are spelled as in the producer's "
        "`VLLM_NIXL_SIDE_CHANNEL_HOST`; see docs/operations.md",
    )
    model_fingerprint: str | None = _option(
        None,
        name,
        "a name for the weights; engines with equal names are taken to have the same weights",
    )
    description_file: str | None = _option(
        None,
        path,
        "a file to which the engine writes its description at start, for `kvferry plan`; `{engine_id}` in its name is "
        "replaced",
    )
    trace_dir: str | None = _option(
        None,
        path,
        "a folder in which each process of this engine records the events of requests, for `kvferry trace`; default: "
        "nothing is recorded",
    )
    trace_max_bytes: int = _option(
        DEFAULT_BYTES,
        whole(SMALLEST_BYTES, 1 << 40),
        "bytes per process in `trace_dir`; the newest events are kept",
    )


WITHOUT_MEANING = {
    "enforce_handshake_compat": "each fact is compared by itself; name the weights with model_fingerprint instead",
    "push_registration_timeout": "transfers are pulled, never pushed",
    "enable_cross_layers_blocks": "any two memory layouts are paired",
}
"""Keys of vLLM's NixlConnector that have no effect here, and why not."""

FORMER_KEYS = {
    "allow_cumem_allocator": "--enable-cumem-allocator needs no key any more",
}
"""Keys of earlier releases. A configuration that still has one starts."""


def known_keys() -> tuple[str, ...]:
    """All keys that are accepted under any name, apart from `FORMER_KEYS`."""
    options = [option.name for option in fields(FerryConfig)]
    return tuple(sorted([*options, *WITHOUT_MEANING]))


def read_config(
    extra: Mapping[str, Any], kv_connector: str | None = "FerryConnector"
) -> FerryConfig:
    """Parse `kv_connector_extra_config`. A value of None is the default.

    Args:
        kv_connector: the name in `--kv-transfer-config`.

    Raises:
        InvalidConfig: an unknown key, or an invalid value; the text names the key and what is valid.
    """
    # What the stock connector ignores is ignored with a warning under its name. Under any other name it is a mistake.
    is_stock = kv_connector == STOCK_NAME
    options = {option.name: option.metadata for option in fields(FerryConfig)}
    ignored = {**WITHOUT_MEANING, **FORMER_KEYS}
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if key in options:
            if value is not None:
                values[key] = options[key]["check"](key, value)
        elif key in ignored:
            logger.warning("%s=%r has no effect: %s", key, value, ignored[key])
        else:
            accepted_keys = one_of(str(key), known_keys())
            if not is_stock:
                raise InvalidConfig(str(key), value, accepted_keys)
            logger.warning(
                "%s=%s is not a key of kvferry and is ignored; %s",
                key,
                shorten(value),
                accepted_keys,
            )
    return FerryConfig(**values)


def check_role(config: FerryConfig, kv_role: str | None) -> None:
    """Check the configuration against the engine's role.

    Raises:
        InvalidConfig: `prewarm_peers` with a role that does not consume; a host in it or in `prefix_sources` that
            `allowed_hosts` does not list.
    """
    if config.prewarm_peers and kv_role == "kv_producer":
        raise InvalidConfig(
            "prewarm_peers",
            list(config.prewarm_peers),
            "none: a kv_producer reads from no engine",
        )
    if config.allowed_hosts is None:
        return
    allowed = AllowedHosts.from_entries(config.allowed_hosts)
    configured = {
        "prewarm_peers": config.prewarm_peers,
        "prefix_sources": config.prefix_sources,
    }
    for key, peers in configured.items():
        for peer in peers:
            host, _ = address_of(peer)
            if not allowed.allow(host):
                raise InvalidConfig(key, peer, "hosts that allowed_hosts lists")
