"""The brute-force model of DualChunkSwap, token by token, and the batches that are drawn against it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

PADDING = -1


@dataclass(frozen=True)
class Batch:
    """One step of an engine.

    Attributes:
        reorder_threshold: None where the attention backend tells no decodes apart.
        scheduled, computed: tokens per request, of this step and of those before.
    """

    ranks: int
    reorder_threshold: int | None
    scheduled: tuple[int, ...]
    computed: tuple[int, ...]

    def is_decode(self, request: int) -> bool:
        """Few enough tokens, and a context that they follow."""
        if self.reorder_threshold is None or not self.computed[request]:
            return False
        return 0 < self.scheduled[request] <= self.reorder_threshold

    def chunks(self, request: int) -> list[list[int]]:
        """A prefill's tokens in the scheduled order, padded and cut into two chunks for every rank."""
        size = -(-self.scheduled[request] // (2 * self.ranks))
        tokens = self.tokens(request) + [PADDING] * (
            2 * self.ranks * size - self.scheduled[request]
        )
        return (
            [tokens[at : at + size] for at in range(0, len(tokens), size)]
            if size
            else [[]] * (2 * self.ranks)
        )

    def tokens(self, request: int) -> list[int]:
        start = sum(self.scheduled[:request])
        return list(range(start, start + self.scheduled[request]))

    def rank_tokens(self, rank: int) -> list[int]:
        """The rows of a rank: indices in the scheduled order, or padding."""
        rows = []
        for request in range(len(self.scheduled)):
            if self.is_decode(request):
                rows += self.tokens(request)
            else:
                chunks = self.chunks(request)
                rows += chunks[rank] + chunks[-1 - rank]
        return rows

    def padded_tokens(self) -> list[int]:
        """All rows in the padded order; a token that is there again, of a decode, counts as padding."""
        rows = []
        for request, count in enumerate(self.scheduled):
            if self.is_decode(request):
                rows += self.tokens(request) + [PADDING] * (count * (self.ranks - 1))
            else:
                for chunk in self.chunks(request):
                    rows += chunk
        return rows

    def requests(self) -> list[int]:
        """The request of each token in the scheduled order."""
        return [
            request
            for request, count in enumerate(self.scheduled)
            for _ in range(count)
        ]

    def positions(self) -> list[int]:
        """The positions of the tokens in the scheduled order."""
        return [
            done + at
            for count, done in zip(self.scheduled, self.computed, strict=True)
            for at in range(count)
        ]


_RANKS = st.sampled_from((2, 4, 1, 3, 8))
_THRESHOLDS = st.sampled_from((1, 1, None, 3, 9, 128))
_TOKENS = st.one_of(
    st.sampled_from((1, 0)),
    st.integers(1, 9),
    st.integers(10, 70),
    st.sampled_from((8, 16, 64)),
)
_COMPUTED = st.sampled_from((0, 0, 7, 4096))


@st.composite
def batches(draw: st.DrawFn, ranks: st.SearchStrategy[int] = _RANKS) -> Batch:
    """Any mix of prefills (short ones, chunked ones), decodes, and requests of no tokens."""
    requests = draw(st.lists(st.tuples(_TOKENS, _COMPUTED), max_size=7))
    scheduled, computed = (
        tuple(count for count, _ in requests),
        tuple(done for _, done in requests),
    )
    return Batch(draw(ranks), draw(_THRESHOLDS), scheduled, computed)
