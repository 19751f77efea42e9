"""Engines that a request names because they may have the first part of its prompt: where a prefix is asked for.

Routers that follow the KV events of a fleet know which engine has what, and name it in one of these ways. None has
anything of kvferry's in it, so a source is an address and no more, and it is asked only where the operator has allowed
its host (`allowed_hosts`, `prefix_sources`, a secret): clients can write most of them.

    kv_transfer_params.remote_kv_source = {kv_request_id, remote_host, remote_port}
        llm-d's sidecar, for the header `x-kv-cache-source-host-port`; alone, or on a prefill leg beside its
        `do_remote_decode`. Its `kv_request_id` has a meaning for vLLM's own P2P tier only.
    kv_hints.actions[…] = {action_type: "kv.fetch", action_version: "1.0",
                           payload: {source_control_endpoint, block_hashes, mode}}
        Dynamo's router, by a worker that hands them to vLLM as such. The hashes are those of its engines, which have no
        meaning here: whether the source has this prompt is decided by its digests (`kvferry.protocol.queries`).
    kv_transfer_params.kv_hint = {protocol_version, message_id, actions: as above}
        Dynamo's worker before vLLM had hints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvferry.protocol.convert import OBJECTS, as_nested
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.hosts import address_of
from kvferry.protocol.ids import Port, Text
from kvferry.protocol.params import MAX_KEYS

MAX_SOURCES = 8
"""Most engines that are asked for one prompt, whoever names them."""
MAX_ACTIONS = 64
"""Most actions of a request's hints; they may be of other kinds, and of these several may be `kv.fetch`."""

SOURCE_KEY = "remote_kv_source"
HINT_KEY = "kv_hint"
FETCH = "kv.fetch"

_FETCH_MAJOR = "1"
_COPY = "copy"
_ENDPOINT = "source_control_endpoint"
_SCHEME = "tcp://"
_MAX_ENDPOINT = 300
_LISTS = (list, tuple)


class PrefixSource(msgspec.Struct, frozen=True, kw_only=True):
    """The side channel of an engine that may have the first part of a prompt."""

    remote_host: Text
    remote_port: Port


def read_sources(raw: Mapping[str, Any]) -> tuple[PrefixSource, ...]:
    """The sources in `kv_transfer_params`; none if the object names none.

    Args:
        raw: an object that `read_params` has read.

    Returns:
        At most `MAX_SOURCES`: a router that knows several may send a list in place of the one object.

    Raises:
        InvalidParams: one is not usable; the error names the field.
    """
    named = raw.get(SOURCE_KEY)
    if not named:
        # llm-d's sidecar omits the key; other routers send null, or an empty object, for a source that they lack.
        return ()
    if not isinstance(named, _LISTS):
        return (_source(named, SOURCE_KEY),)
    if len(named) > MAX_SOURCES:
        raise InvalidParams(
            SOURCE_KEY, f"{len(named)} sources", f"at most {MAX_SOURCES}"
        )
    return tuple(
        _source(one, f"{SOURCE_KEY}[{index}]") for index, one in enumerate(named)
    )


def read_hint(raw: Mapping[str, Any]) -> tuple[PrefixSource, ...]:
    """The sources in the hint that `kv_transfer_params` carry; none without one. See `read_hints`."""
    hint = raw.get(HINT_KEY)
    if not hint:
        return ()
    if not isinstance(hint, OBJECTS):
        raise InvalidParams(HINT_KEY, hint, "an object")
    actions = hint.get("actions") or ()
    if not isinstance(actions, _LISTS):
        raise InvalidParams(f"{HINT_KEY}.actions", actions, "a list of actions")
    return read_hints(actions, HINT_KEY)


def read_hints(
    actions: Iterable[object], where: str = "kv_hints"
) -> tuple[PrefixSource, ...]:
    """The sources in a request's hints: of all actions `kv.fetch` of version 1 that name one and want a copy.

    Args:
        actions: each has `action_type`, `action_version` and `payload`, as attributes or keys; those of other types
            and of other versions are not read.
        where: the hints, in errors.

    Returns:
        At most `MAX_SOURCES`, in the order of the actions.

    Raises:
        InvalidParams: there are more than `MAX_ACTIONS`, or one is not usable; the error names the field.
    """
    sources = tuple(_hinted(actions, f"{where}.actions"))
    if len(sources) > MAX_SOURCES:
        raise InvalidParams(
            f"{where}.actions", f"{len(sources)} sources", f"at most {MAX_SOURCES}"
        )
    return sources


def _field(action: object, name: str) -> object:
    if isinstance(action, OBJECTS):
        return action.get(name)
    return getattr(action, name, None)


def _hinted(actions: Iterable[object], all_actions: str) -> Iterator[PrefixSource]:
    for index, action in enumerate(actions):
        if index >= MAX_ACTIONS:
            raise InvalidParams(all_actions, "more actions", f"at most {MAX_ACTIONS}")
        if _field(action, "action_type") != FETCH:
            continue
        version = _field(action, "action_version")
        if not isinstance(version, str) or version.split(".")[0] != _FETCH_MAJOR:
            continue
        where = f"{all_actions}[{index}].payload"
        payload = _field(action, "payload")
        if not isinstance(payload, OBJECTS):
            raise InvalidParams(where, payload, "an object")
        mode = payload.get("mode") or _COPY
        if mode != _COPY:
            # "move" means that the source gives its copy up, which a reader cannot make it do.
            raise InvalidParams(f"{where}.mode", mode, f'"{_COPY}"')
        endpoint = payload.get(_ENDPOINT)
        if endpoint is not None:
            yield _of_endpoint(endpoint, f"{where}.{_ENDPOINT}")


def _of_endpoint(endpoint: object, where: str) -> PrefixSource:
    expected = "host:port or tcp://host:port of a side channel"
    if not isinstance(endpoint, str) or len(endpoint) > _MAX_ENDPOINT:
        raise InvalidParams(where, endpoint, expected)
    try:
        host, port = address_of(endpoint.removeprefix(_SCHEME))
    except ValueError:
        raise InvalidParams(where, endpoint, expected) from None
    return PrefixSource(remote_host=host, remote_port=port)


def _source(named: object, where: str) -> PrefixSource:
    if isinstance(named, OBJECTS) and len(named) > MAX_KEYS:
        raise InvalidParams(where, f"{len(named)} keys", f"at most {MAX_KEYS} keys")
    return as_nested(named, PrefixSource, InvalidParams, where)
