"""Whether it pays to read a prefix from another engine: an estimate from this engine's own measurements. No clock.

    reading n tokens     OVERHEAD_S + n · token_bytes / bytes a second from that engine
    computing n tokens   n / tokens a second of the steps that computed prompts

Both speeds are sums with decay, so that large loads and long steps weigh most, and a changed speed is found within a
few of them. What was never measured is assumed: in favour of a load, since the first one measures it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.link.commands import Producer
from kvferry.protocol.digests import CHUNK_TOKENS

OVERHEAD_S = 0.005
"""What a pull takes beside its bytes: a round trip, the handover to the workers, the fence, and the step that reports
it. On one host 2 to 4 ms."""
ASSUMED_BYTES_S = 1e9
"""From an engine of which nothing was loaded in the last `FRESH_S`: what TCP gives within a rack, a tenth of RDMA."""
ASSUMED_TOKENS_S = 10_000.0
"""Before this engine has computed a prompt."""
FRESH_S = 60.0
"""How long a measured bandwidth counts. A slow load would otherwise be the last from that engine: nothing would ever
measure it again."""
SHORTEST_STEP_TOKENS = 64
"""A step of fewer tokens says little about the speed of prompts: it is bound by reading the weights."""
MAX_WAIT_S = 1.0
"""Longest wait of a request for answers, however long its prompt takes."""
UNMEASURED_WAIT_S = 0.1
"""The same before this engine has computed a prompt."""
MAX_PRODUCERS = 1 << 10

_DECAY = 0.8


@dataclass(slots=True)
class _Speed:
    """Amounts and the seconds that they took, the latest ones weighing most."""

    amount: float = 0.0
    seconds: float = 0.0
    measured_s: float = 0.0

    def add(self, amount: float, seconds: float, now_s: float = 0.0) -> None:
        self.amount = self.amount * _DECAY + amount
        self.seconds = self.seconds * _DECAY + seconds
        self.measured_s = now_s

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds


@dataclass(slots=True)
class StepPace:
    """The time of each step, from when it began.

    vLLM has up to `depth` steps in flight: a step begins when the one `depth` before it has ended. So in an engine that
    is never idle, step `i` took from the beginning of step `i + depth - 1` to that of step `i + depth`.

    Attributes:
        depth: 1 where a step begins after the one before it.
    """

    depth: int
    _begun: deque[tuple[float, int]] = field(default_factory=deque)
    _requests: Mapping[str, int] = field(default_factory=dict)

    def begin(
        self, scheduled: Mapping[str, int], num_tokens: int, now_s: float
    ) -> tuple[int, float] | None:
        """A step begins that computes tokens of these requests, `num_tokens` in all.

        Returns:
            Tokens and seconds of the earlier step that has ended; None if that is not known.
        """
        # A request that stays was not waited for. Between other steps the engine may have had nothing to do.
        is_busy = not self._requests.keys().isdisjoint(scheduled)
        self._requests = scheduled
        if not is_busy:
            self._begun.clear()
        self._begun.append((now_s, num_tokens))
        if len(self._begun) <= self.depth:
            return None
        before_s, _ = self._begun[-2]
        _, tokens = self._begun.popleft()
        return tokens, now_s - before_s


class PullEstimate:
    """What was measured so far.

    Args:
        token_bytes: of a token's cache on one worker. All workers load at the same time.
        min_tokens: the operator's `prefix_pull_min_tokens`, which replaces the estimate.
        max_steps: the most steps in flight.
    """

    def __init__(
        self, token_bytes: float, min_tokens: int | None = None, max_steps: int = 1
    ) -> None:
        self.token_bytes = token_bytes
        self.min_tokens = min_tokens
        self._pace = StepPace(max_steps)
        self._computing = _Speed()
        self._loading: OrderedDict[Producer, _Speed] = OrderedDict()

    def step_begins(
        self, scheduled: Mapping[str, int], num_tokens: int, now_s: float
    ) -> None:
        """A step begins that computes tokens of these requests, `num_tokens` in all; another one may have ended."""
        ended = self._pace.begin(scheduled, num_tokens, now_s)
        if ended is not None:
            self.computed(*ended)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        if num_tokens >= SHORTEST_STEP_TOKENS and seconds > 0:
            self._computing.add(num_tokens, seconds)

    def loaded(
        self, producer: Producer, num_tokens: int, seconds: float, now_s: float
    ) -> None:
        """A load has ended well, so long after its order."""
        if seconds <= 0:
            return
        speed = self._loading.get(producer)
        if speed is None or now_s > speed.measured_s + FRESH_S:
            speed = _Speed()
            self._loading[producer] = speed
        speed.add(num_tokens * self.token_bytes, seconds, now_s)
        # Bounded, since requests name producers: the one that was loaded from longest ago is forgotten.
        self._loading.move_to_end(producer)
        if len(self._loading) > MAX_PRODUCERS:
            self._loading.popitem(last=False)

    def tokens_s(self) -> float:
        """Tokens that this engine computes in a second."""
        if not self._computing.seconds:
            return ASSUMED_TOKENS_S
        return self._computing.per_s

    def bytes_s(self, producer: Producer, now_s: float) -> float:
        """Bytes that a worker of this engine reads from there in a second."""
        speed = self._loading.get(producer)
        if speed is None or now_s > speed.measured_s + FRESH_S:
            return ASSUMED_BYTES_S
        return speed.per_s

    def compute_s(self, num_tokens: int) -> float:
        """How long it takes to compute so many tokens."""
        return num_tokens / self.tokens_s()

    def load_s(self, producer: Producer, num_tokens: int, now_s: float) -> float:
        """How long it takes to load so many tokens from there."""
        num_bytes = num_tokens * self.token_bytes
        return OVERHEAD_S + num_bytes / self.bytes_s(producer, now_s)

    def least_tokens(self, producer: Producer, now_s: float) -> int | None:
        """The fewest missing tokens that are sooner loaded from there than computed; None if no number of them is."""
        if self.min_tokens is not None:
            return self.min_tokens
        # Each token must be loaded sooner than it is computed, and so many must be that this pays for the overhead.
        loading_s = self.token_bytes / self.bytes_s(producer, now_s)
        gain_s = 1.0 / self.tokens_s() - loading_s
        if gain_s <= 0:
            return None
        return max(1, math.ceil(OVERHEAD_S / gain_s))

    def wait_s(self, num_tokens: int) -> float:
        """How long a request may wait to hear whether it can load so many tokens."""
        if not self._computing.seconds:
            return UNMEASURED_WAIT_S
        return min(self.compute_s(num_tokens), MAX_WAIT_S)


def whole_chunks(num_tokens: int) -> int:
    """The tokens of the whole chunks of a prompt: what a query covers."""
    return num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
