"""Every target under hypothesis: bytes of any kind, and those of the corpus with some of them changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.fuzz.targets import ALL, DECISIONS, seeds
from tests.promises import promise

EXAMPLES = {
    "planning": 500,
    "pairing": 400,
    "mutated_params": 600,
    "mutated_orders": 100,
}
EXAMPLES_OF_OTHERS = 250


@st.composite
def hostile_bytes(draw: st.DrawFn, name: str) -> bytes:
    """Noise; or decisions without a preference, which hypothesis has; or a seed with a part of it changed."""
    kind = draw(st.integers(0, 3))
    noise = draw(st.binary(max_size=60))
    found = seeds(name)
    if kind == 0 or not found:
        return noise
    if kind < 3 and found is DECISIONS:
        return random.Random(draw(st.integers(0, 2**64 - 1))).randbytes(80) + noise
    seed = draw(st.sampled_from(found))
    at = draw(st.integers(0, len(seed)))
    return seed[:at] + noise + seed[at + draw(st.integers(0, 20)) :]


@promise(6)
@pytest.mark.parametrize("name", ALL)
def test_no_input_makes_anything_but_a_typed_refusal(name: str) -> None:
    @settings(max_examples=draws(EXAMPLES.get(name, EXAMPLES_OF_OTHERS)))
    @given(hostile_bytes(name))
    def fuzz(data: bytes) -> None:
        ALL[name](data)

    fuzz()


@pytest.mark.parametrize("name", ALL)
def test_every_seed_passes(name: str) -> None:
    for seed in seeds(name):
        ALL[name](seed)
