"""Identifiers and the word in a lease slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.ids import Epoch
from kvferry.protocol.slots import (
    EMPTY,
    SLOT_BYTES,
    SlotState,
    epoch_from_text,
    epoch_to_text,
    new_epoch,
    slot_word,
)

EPOCHS = st.integers(1, 2**60 - 1).map(Epoch)


@given(EPOCHS)
def test_an_epoch_survives_as_15_hexadecimal_digits(epoch: Epoch) -> None:
    text = epoch_to_text(epoch)
    assert len(text) == 15
    assert text == text.lower()
    assert epoch_from_text(text) == epoch


def test_drawn_epochs_differ_fit_and_are_never_zero() -> None:
    drawn = [new_epoch() for _ in range(2000)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 < epoch < 2**60 for epoch in drawn)
    assert max(drawn) > 2**55, "the upper bits are never used"


@given(EPOCHS, EPOCHS, st.sampled_from(SlotState), st.sampled_from(SlotState))
def test_two_slot_words_are_equal_only_for_the_same_lease_in_the_same_state(
    epoch: Epoch, other: Epoch, state: SlotState, other_state: SlotState
) -> None:
    word = slot_word(epoch, state)
    assert (word == slot_word(other, other_state)) == (
        (epoch, state) == (other, other_state)
    )
    assert word != EMPTY
    assert word < 2 ** (8 * SLOT_BYTES)
    assert (word >> 4, word & 0xF) == (epoch, state)
