"""The formula of bytes for pairs of equal and of unequal engines."""

from __future__ import annotations

import pytest

from scripts.accuracy.judging import Expected, formula_of
from scripts.accuracy.model import CacheShape
from scripts.accuracy.settings import read_settings

SHAPE = CacheShape(layers=2, kv_heads=4, head_dim=8)
TOKEN = 2 * 4 * 2 * 8 * 4


@pytest.mark.parametrize(("theirs", "ours", "unit"), [(128, 128, 128), (32, 64, 32), (128, 32, 32), (96, 64, 32)])
def test_bytes_are_counted_in_tokens_that_are_whole_on_both_sides(theirs: int, ours: int, unit: int) -> None:
    formula = formula_of(Expected(block=ours, prefill_block=theirs), read_settings({}, gpus=0), SHAPE)
    assert formula is not None
    assert (formula.block, formula.token_bytes, formula.more) == (unit, TOKEN, None)
    assert formula.bytes_of(unit + 1, 0) == 2 * unit * TOKEN


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "heads"), [(1, 1, 4), (1, 2, 8), (8, 1, 8), (8, 2, 16)])
def test_staged_reads_may_bring_whole_blocks_with_all_heads_to_every_worker(
    prefill_tp: int, decode_tp: int, heads: int
) -> None:
    sizes = {"PREFILLER_TP_SIZE": str(prefill_tp), "DECODER_TP_SIZE": str(decode_tp)}
    reported = Expected(block=32, prefill_block=128, staged=True)
    formula = formula_of(reported, read_settings(sizes, gpus=0), SHAPE)
    assert formula is not None
    assert formula.more is not None
    assert (formula.block, formula.more.block) == (32, 128)
    assert formula.more.token_bytes == TOKEN * heads // 4
