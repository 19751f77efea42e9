"""Whether a window's blocks reach back far enough, against the definition of attention."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.plan.blocks import held_from, reaches_back
from kvferry.protocol.handshake import CacheGroup

small = st.integers(1, 24)


def in_blocks_of(wanted: set[int], block: int, num_tokens: int) -> set[int]:
    """The tokens of a sequence that lie in a block with one of these."""
    blocks = {token // block for token in wanted}
    return {token for token in range(num_tokens) if token // block in blocks}


@given(
    policy=st.sampled_from(("window", "chunk")),
    window=small,
    block=small,
    own_block=small,
    num_tokens=st.integers(1, 80),
    more=st.integers(0, 3),
    dropped=st.integers(0, 80),
)
@example(
    policy="window", window=32, block=16, own_block=16, num_tokens=47, more=0, dropped=1
)
@example(
    policy="window", window=32, block=16, own_block=16, num_tokens=47, more=1, dropped=1
)
@example(
    policy="window", window=48, block=16, own_block=32, num_tokens=70, more=0, dropped=1
)
@example(
    policy="window", window=48, block=32, own_block=16, num_tokens=63, more=0, dropped=0
)
@example(
    policy="window", window=1, block=16, own_block=16, num_tokens=48, more=0, dropped=3
)
@example(
    policy="window", window=1, block=16, own_block=16, num_tokens=47, more=0, dropped=2
)
@example(
    policy="window", window=1, block=16, own_block=16, num_tokens=47, more=0, dropped=3
)
@example(
    policy="window", window=1, block=7, own_block=16, num_tokens=48, more=1, dropped=7
)
@example(
    policy="chunk", window=16, block=16, own_block=16, num_tokens=48, more=0, dropped=3
)
@example(
    policy="chunk", window=16, block=16, own_block=16, num_tokens=48, more=1, dropped=3
)
@example(
    policy="chunk", window=20, block=16, own_block=16, num_tokens=47, more=1, dropped=2
)
@example(
    policy="chunk", window=1, block=16, own_block=16, num_tokens=48, more=0, dropped=3
)
def test_a_window_suffices_when_all_that_is_attended_to_is_kept_and_all_that_is_kept_is_held(
    policy: str,
    window: int,
    block: int,
    own_block: int,
    num_tokens: int,
    more: int,
    dropped: int,
) -> None:
    def attends(token: int, to: int) -> bool:
        return (
            token - to < window
            if policy == "window"
            else token // window == to // window
        )

    total = -(-num_tokens // block)
    dropped = min(dropped, total)
    first_held = held_from(block, total - dropped, num_tokens)
    assert first_held == dropped * block
    held = set(range(first_held, num_tokens))
    in_window = {token for token in range(num_tokens) if attends(num_tokens, token)}
    kept = in_blocks_of(in_window | {num_tokens}, own_block, num_tokens)
    computed_next = num_tokens if more else num_tokens - 1
    attended = {
        token for token in range(computed_next) if attends(computed_next, token)
    }
    group = CacheGroup(policy=policy, block_tokens=block, window_tokens=window)
    got = reaches_back(group, own_block, first_held, num_tokens, num_tokens + more)
    assert got == (attended <= kept <= held)


def test_a_full_group_is_not_judged_by_its_window() -> None:
    assert reaches_back(CacheGroup(policy="full", block_tokens=16), 16, 0, 100, 100)


def test_ranks_that_share_tokens_out_hold_more_of_them_in_a_block() -> None:
    """Two ranks, 16 slots a block: 100 tokens are 4 blocks of 32, and the last two begin with token 64."""
    assert held_from(2 * 16, 2, 100) == 64
    assert held_from(2 * 16, 4, 100) == 0


def test_a_state_that_has_seen_the_last_token_is_of_no_use() -> None:
    state = CacheGroup(policy="state", block_tokens=512)
    assert reaches_back(state, 512, 0, 99, 100)
    assert reaches_back(state, 512, 0, 60, 100)
    assert not reaches_back(state, 512, 0, 100, 100)
