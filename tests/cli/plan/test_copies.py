"""`--copies`: every elementary copy of a request, as it would be made."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.arguments import InvalidCopies
from kvferry.cli.plan.copies import copy_lines, read_request
from kvferry.plan.planner import plan_engine
from kvferry.protocol.geometry import PagedTensor
from tests.cli.command import refused, run
from tests.cli.plan.forms import read_pair
from tests.draws import draws

MODEL = "layers=2,heads=4,dim=4,blocks=8"
REQUEST: dict[str, Any] = {
    "remote_block_ids": [[5, 3, 6]],
    "local_block_ids": [[2, 7]],
    "num_tokens": 40,
}
PAIR = (f"{MODEL},tp=2,layout=NHD", f"{MODEL},block=32")


def written(folder: Path, **changes: object) -> str:
    path = folder / "request.json"
    plain = {**REQUEST, **changes}
    kept = {key: value for key, value in plain.items() if value != "..."}
    path.write_text(json.dumps(kept))
    return str(path)


def lines_of(folder: Path, *pair: str, **changes: object) -> list[dict[str, Any]]:
    ran = run("plan", *pair, "--copies", written(folder, **changes))
    assert (ran.code, ran.err) == (0, "")
    return [json.loads(line) for line in ran.out.splitlines()]


def address(one: PagedTensor, block: int, head: int, token: int) -> int:
    """The address of a global head of a token of a kernel block."""
    return (
        one.base
        + block * one.block_stride
        + (head - one.heads.start) * one.head_stride
        + token * one.tile_stride
    )


@pytest.mark.parametrize("pool", ["0", "1048576"])
def test_all_copies_together_move_every_entry_of_every_token_to_its_place(
    tmp_path: Path, pool: str
) -> None:
    """The oracle walks over layers, heads and tokens and knows only the address formula."""
    pool_bytes = ("--staging-pool-bytes", pool)
    ran = run("plan", *PAIR, "--copies", written(tmp_path), *pool_bytes)
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert {line["via"] for line in lines} == {"direct" if pool == "0" else "staged"}
    source_of: dict[int, tuple[int, int]] = {}
    for line in lines:
        for byte in range(line["bytes"]):
            assert line["dst"] + byte not in source_of, "written twice"
            source_of[line["dst"] + byte] = (line["producer"]["tp"], line["src"] + byte)
    producer, consumer = read_pair(*PAIR)
    # By tensor and head the rank that has it, and the tensor there.
    held = {}
    for worker in producer.workers:
        for remote in worker.tensors:
            for head in range(remote.heads.start, remote.heads.stop):
                held[remote.name, head] = (worker.place.tp, remote)
    for local in consumer.workers[0].tensors:
        for head, token in itertools.product(range(4), range(40)):
            rank, remote = held[local.name, head]
            dst = address(local, (2, 7)[token // 32], head, token % 32)
            src = address(remote, (5, 3, 6)[token // 16], head, token % 16)
            for byte in range(local.cell_bytes):
                assert source_of[dst + byte] == (rank, src + byte)


def test_only_the_tokens_that_are_asked_for_are_copied(tmp_path: Path) -> None:
    whole = lines_of(tmp_path, *PAIR)
    part = lines_of(tmp_path, *PAIR, first_token=16, stop_token=32)
    assert 0 < len(part) < len(whole)
    assert {json.dumps(line) for line in part} < {json.dumps(line) for line in whole}
    _, consumer = read_pair(*PAIR)
    first = consumer.workers[0].tensors[0]
    block = first.base + 2 * first.block_stride
    offsets = [line["dst"] - block for line in part]
    inside = [offset for offset in offsets if 0 <= offset < first.block_stride]
    assert inside
    wanted = 16 * first.tile_stride
    assert all(offset % first.head_stride >= wanted for offset in inside)


def test_converted_copies_name_the_conversion_and_count_the_written_bytes(
    tmp_path: Path,
) -> None:
    pair = (MODEL, f"{MODEL},dtype=float32")
    lines = lines_of(tmp_path, *pair, local_block_ids=[[2, 7, 1]])
    assert {line["convert"] for line in lines} == {"bfloat16 becomes float32"}
    assert {line["via"] for line in lines} == {"staged"}
    assert sum(line["bytes"] for line in lines) == 2 * 2 * 4 * 4 * 4 * 48


def test_copies_can_be_written_to_a_file_beside_the_table_or_the_json(
    tmp_path: Path,
) -> None:
    out = tmp_path / "copies.jsonl"
    request = written(tmp_path)
    for form, begins in (((), "producer TP 2"), (("--json",), "{")):
        out.unlink(missing_ok=True)
        ran = run("plan", *PAIR, "--copies", request, "--out", str(out), *form)
        assert ran.code == 0
        assert ran.out.startswith(begins)
        assert out.read_text() == run("plan", *PAIR, "--copies", request).out


def test_json_and_copies_cannot_share_one_output(tmp_path: Path) -> None:
    assert "--out FILE with it" in refused(
        "plan", *PAIR, "--copies", written(tmp_path), "--json"
    )


# What differs from REQUEST, and the error.
WRONG = """
{"num_tokens": "..."}                   | num_tokens is missing
{"num_tokens": 0}                       | num_tokens is 0; expected `int` >= 1
{"num_tokens": "40"}                    | num_tokens is '40'; expected `int`
{"num_tokens": 49}                      | remote_block_ids[0] is
{"num_tokens": 20}                      | remote_block_ids[0] is '3 blocks'; expected at most 2 blocks for 20 tokens
{"remote_block_ids": [[5, 3]]}          | [0] is '2 blocks'; expected blocks for all tokens from 0 to 40
{"remote_block_ids": [[5, 3, 8]]}       | remote_block_ids[0] is 8; expected block ids up to 7
{"local_block_ids": [[2, 8]]}           | local_block_ids[0] is 8; expected block ids up to 7
{"local_block_ids": [[2]]}              | is 'tokens up to 40'; expected no more than 1 local blocks
{"remote_block_ids": [[5, 3, 6], []]}   | remote_block_ids is '2 lists'; expected one per cache group: 1
{"local_block_ids": []}                 | local_block_ids is []; expected `array` of length >= 1
{"local_block_ids": [[-1, 2]]}          | local_block_ids[0][0] is -1
{"remote_block_ids": [[5, 3, 1.5]]}     | remote_block_ids[0][2] is 1.5
{"first_token": 40}                     | first_token is 40; expected below 40
{"first_token": -1}                     | first_token is -1
{"stop_token": 41}                      | stop_token is 41; expected at most num_tokens=40
{"first_tokens": 3}                     | first_tokens is unknown; did you mean first_token? one of
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_request_that_is_wrong_is_one_line_on_standard_error(
    tmp_path: Path, line: str
) -> None:
    changes, said = line.split(" | ")
    path = written(tmp_path, **json.loads(changes))
    line = refused("plan", *PAIR, "--copies", path)
    assert line.startswith("kvferry plan: request: ")
    assert said.strip() in line


IDS = st.lists(st.lists(st.integers(-1, 9), max_size=4), max_size=2)
PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "remote_block_ids": IDS | st.none(),
        "local_block_ids": IDS,
        "num_tokens": st.integers(-1, 200) | st.text(max_size=3),
        "first_token": st.integers(-1, 200),
        "stop_token": st.integers(-1, 200) | st.none(),
    },
)


@given(st.binary(max_size=40) | PLAIN.map(lambda plain: json.dumps(plain).encode()))
@settings(max_examples=draws(200))
def test_no_request_raises_anything_but_its_own_error(text: bytes) -> None:
    try:
        blocks = read_request(text, CONSUMER, PRODUCER)
        lines = list(copy_lines(PLANS, CONSUMER, PRODUCER, blocks))
    except InvalidCopies:
        return
    assert all(json.loads(line)["bytes"] > 0 for line in lines)


PRODUCER, CONSUMER = read_pair(*PAIR)
PLANS = plan_engine(CONSUMER, PRODUCER)
