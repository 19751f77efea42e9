"""The errors of kvferry.

    KvferryError
    ├── InputError            wrong input from a router, a client, a peer, the network or a configuration
    │   ├── InvalidParams     … in `kv_transfer_params`
    │   │   └── ForeignParams … written by another connector (they have no `kvferry` object)
    │   ├── InvalidMessage    … in a frame of the side channel or a notification
    │   ├── InvalidDescription … in the JSON of an engine's description
    │   ├── InvalidConfig     … in the configuration of this engine
    │   │   ├── InvalidSecretFile … in the file of the side channel's secrets, its owner or its mode
    │   │   └── UnsupportedVllm   … in the installed vLLM
    │   ├── InvalidBlocks     … in the blocks that a program gives to an engine without vLLM
    │   └── InvalidBatch      … in a step whose tokens are divided among ranks (`kvferry.worker.context_parallel`)
    ├── PeerRefused           the other engine answered with a refusal
    ├── HandshakeFailed       no usable answer came from the other engine in time
    │   ├── ConnectionEnded   … because it closed the connection
    │   └── NothingListens    … because its port is closed, or its host cannot be reached
    ├── PlanRefused           the two engines cannot be paired (`kvferry.plan`)
    ├── AttentionRefused      attention backends cannot be context parallel (`kvferry.connector.context_parallel`)
    ├── FabricError           NIXL (`kvferry.worker.fabric.errors`)
    ├── LoadFailed            the blocks of a load must not be used (`kvferry.worker.loads.state`)
    ├── NotMappable           memory of another process cannot be mapped (`kvferry.worker.peer_memory`)
    ├── WithdrawalRefused     an engine cannot fall asleep now (`kvferry.worker.registration`)
    └── LocalProtocolError    this process did something that its own state machine forbids: a bug in kvferry

An `InputError` names the field, the value and what was expected. It never stops a running engine: its handler counts
it, logs it once and goes on without a transfer. Only `InvalidConfig` stops an engine, at its start. Commands have
`InputError`s of their own (`kvferry.cli.arguments`).
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_MAX_SHOWN = 120


class KvferryError(Exception):
    """Base of every error that kvferry raises on purpose."""


class InputError(KvferryError):
    """Input from outside this process that cannot be used.

    Args:
        field: path of the field, e.g. `kvferry.lease_slot`.
        value: its value; shown shortened, so that a hostile value cannot flood a log.
        expected: description of a valid value.
    """

    what = "input"

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.shown_value = shorten(value)
        self.expected = expected
        # `one_of` guesses a name; the guess is a sentence of its own.
        is_guess = expected.startswith("did you mean")
        wanted = expected if is_guess else f"expected {expected}"
        problem = f"{field} is {self.shown_value}; {wanted}"
        super().__init__(f"{self.what}: {problem}" if self.what else problem)


class Shown(str):
    """A value that an error shows as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


MISSING = Shown("missing")
UNKNOWN = Shown("unknown")


class InvalidBlocks(InputError):
    """Blocks of a prompt that an engine without vLLM cannot offer, or cannot load into."""

    what = "blocks"


class InvalidParams(InputError):
    """`kv_transfer_params` that cannot be used."""

    what = "kv_transfer_params"


class ForeignParams(InvalidParams):
    """`kv_transfer_params` of another connector: valid for that one, but not usable here."""


class InvalidMessage(InputError):
    """A frame or notification that cannot be used."""

    what = "message"


class InvalidDescription(InputError):
    """A description JSON that cannot be used."""

    what = "description JSON"


class InvalidConfig(InputError):
    """A configuration key or value that cannot be used; stops the start."""

    what = "kv_connector_extra_config"


class InvalidSecretFile(InvalidConfig):
    """A file of secrets that cannot be used; stops the start. Never shows the file's content."""

    what = "secret file"


class UnsupportedVllm(InvalidConfig):
    """A vLLM version that kvferry was not tested with; stops the start."""

    what = "vLLM"


class PeerRefused(KvferryError):
    """The other engine answered a request with a refusal; the text is its reason."""


class HandshakeFailed(KvferryError):
    """No usable description came from the other engine within the deadline."""


class ConnectionEnded(HandshakeFailed):
    """The other engine closed the connection, or died."""


class NothingListens(HandshakeFailed):
    """The port is closed, or the network says that its host cannot be reached."""


class LocalProtocolError(KvferryError):
    """This process attempted a transition that its own state machine forbids. The state is unchanged."""


def shorten(value: object) -> str:
    """`repr` of a value, cut to a length that is safe to log."""
    # Not `repr` and then a cut: the repr of a huge or deep container takes its time and its memory before it is cut.
    try:
        text = _short_repr.repr(value)
    except Exception:  # noqa: BLE001 - a hostile __repr__ must not get further than this line
        text = f"<{type(value).__name__}>"
    return cut(text)


def one_of(given: str, accepted: Iterable[str], *, is_long: bool = False) -> str:
    """`did you mean …? one of …`, for the `expected` of an error.

    Args:
        given: the name that is not accepted. A guess is made only if an accepted name is close to it.
        is_long: the list is too long to be shown beside a guess.
    """
    names = {name.lower(): name for name in accepted}
    listed = f"one of {', '.join(names.values())}"
    near = difflib.get_close_matches(given.lower(), names, n=1)
    if not near:
        return listed
    guess = f"did you mean {names[near[0]]}?"
    if is_long:
        return guess
    return f"{guess} {listed}"


def cut(text: str) -> str:
    """The text, or its beginning and an ellipsis."""
    if len(text) <= _MAX_SHOWN:
        return text
    return text[: _MAX_SHOWN - 1] + "…"


_SIZED = (list, tuple, dict, set, frozenset, bytes, bytearray, str)


def _summary(value: object) -> str | None:
    if isinstance(value, _SIZED) and len(value) > _MAX_SHOWN:
        return f"{type(value).__name__} of length {len(value)}"
    return None


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = 8
        self.maxtuple = 8
        self.maxdict = 8
        self.maxset = 8
        self.maxfrozenset = 8
        self.maxstring = _MAX_SHOWN
        self.maxlong = _MAX_SHOWN
        self.maxother = _MAX_SHOWN

    def repr1(self, x: Any, level: int) -> str:
        """The short form of a value at any level."""
        # The base class sorts all keys of a dict, and copies all bytes, before it leaves most of them out.
        return _summary(x) or super().repr1(x, level)


_short_repr = _ShortRepr()
