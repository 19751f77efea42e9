"""One prompt that this engine prefills for others: how far it is, and whose query has claimed it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvferry.protocol.digests import Prompt
from kvferry.protocol.queries import (
    NO_PARAMS,
    Answer,
    PromptProgress,
    encode_params,
)
from kvferry.scheduler.producer.lease import ProducerLease

Claimant = tuple[str, int]
"""Engine id of a client, and the number of its query."""

Whole = tuple[int, str]
"""The length of a prompt, and the last of its digests."""


@dataclass(frozen=True, slots=True)
class PromptState:
    """How far a prompt is. Replaced as a whole, since two threads read it.

    Attributes:
        params: of the ticket, not encoded.
        lease: by which the prompt may be read, as long as that has not ended.
        cached_tokens: see `Answer`.
    """

    progress: PromptProgress
    params: object = None
    lease: ProducerLease | None = None
    reason: str = ""
    cached_tokens: int | None = None


QUEUED = PromptState(PromptProgress.QUEUED)


@dataclass(slots=True, eq=False)
class ListedPrompt:
    """One prompt.

    Attributes:
        state: set by the engine's thread, as `is_over` is.
        claimant: whose query it answers. Set after `spans` and `digests`, by the listener's thread.
        spans: of the claimant (`PromptQuery`).
        digests: of the whole prompt; () until a query is compared with them.
        has_ended: whether the listener's thread knows that it is over.
        is_dropped: whether the listener's thread has forgotten it.
        encoded: the params of a state, as they are sent.
    """

    request_id: str
    key: str
    prompt: Prompt
    num_tokens: int
    state: PromptState = QUEUED
    is_over: bool = False
    claimant: Claimant | None = None
    spans: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    has_ended: bool = False
    is_dropped: bool = False
    encoded: tuple[PromptState, msgspec.Raw] | None = None

    @property
    def whole(self) -> Whole:
        """What a query must agree with. The prompt must have been digested."""
        return self.num_tokens, self.digests[-1]

    def answer(self, number: int) -> Answer:
        """The answer to the query of this number, by the present state."""
        # Read once: the engine's thread may replace it at any moment.
        state = self.state
        if state.lease is not None and state.lease.ended_by:
            reason = state.reason or "no_lease"
            return Answer(number=number, progress=PromptProgress.OVER, reason=reason)
        return Answer(
            number=number,
            progress=state.progress,
            params=self._params_of(state),
            reason=state.reason,
            cached_tokens=state.cached_tokens,
        )

    def _params_of(self, state: PromptState) -> msgspec.Raw:
        if state.params is None:
            return NO_PARAMS
        # Kept, since a query is answered again every time that it is repeated.
        if self.encoded is None or self.encoded[0] is not state:
            self.encoded = (state, encode_params(state.params))
        _, params = self.encoded
        return params
