"""`description_file`: written whole when an engine starts, by producers and consumers, and read by `kvferry plan`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.connector.engine.local_engine import write_description
from kvferry.plan.planner import plan_engine
from kvferry.protocol.description_json import (
    decode_engine_json,
    from_engine_json,
    to_engine_json,
)
from kvferry.protocol.errors import InvalidConfig
from tests.cli.command import run
from tests.harness.core.node import Node, stop_parallel_state
from tests.protocol.samples import make_description


def test_the_file_is_the_description_json_of_the_engine_and_can_be_read_by_others(
    tmp_path: Path,
) -> None:
    path = write_description(str(tmp_path / "engine.json"), make_description())
    assert decode_engine_json(path.read_bytes()) == to_engine_json(make_description())
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_the_engines_id_stands_in_the_name_without_leaving_the_folder(
    tmp_path: Path,
) -> None:
    path = write_description(
        str(tmp_path / "{engine_id}.json"), make_description(engine_id="../a/b")
    )
    assert path == tmp_path / ".._a_b.json"
    assert path.exists()


def test_an_old_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text("old")
    with path.open("rb") as reader:
        write_description(str(path), make_description())
        assert reader.read() == b"old", (
            "a reader that has the old file open reads it to its end"
        )
    assert decode_engine_json(path.read_bytes()).engine_id == "prefill-0"


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").mkdir()
    for name in ("missing/engine.json", "taken"):
        with pytest.raises(InvalidConfig, match="description_file") as refused:
            write_description(str(tmp_path / name), make_description())
        assert refused.value.field == "description_file"
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop_parallel_state()


def test_producers_and_consumers_describe_themselves_so_that_they_can_be_planned(
    folder: Path,
) -> None:
    extra = {"description_file": str(folder / "{engine_id}.json")}
    nodes = [
        Node(role, engine_id=role, extra=extra)
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        producer, consumer = (
            from_engine_json(decode_engine_json((folder / f"{node}.json").read_bytes()))
            for node in ROLES
        )
        (plan,) = plan_engine(consumer, producer)
        asked = run(
            "describe", f"127.0.0.1:{nodes[0].port}", "--json", "--timeout", "20"
        )
        assert decode_engine_json(asked.out.encode()) == to_engine_json(producer), (
            asked.err
        )
        assert {item.local.layer for route in plan.routes for item in route.slices} == {
            "model.layers.0.self_attn.attn"
        }
    finally:
        for node in nodes:
            node.close()


ROLES = ("kv_producer", "kv_consumer")
