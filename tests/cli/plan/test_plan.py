"""`kvferry plan`: its output in every format, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import rich.console
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.command import (
    POOL_BYTES_DRAM,
    POOL_BYTES_VRAM,
    longest_staged_run,
)
from kvferry.cli.plan.summary import Flow, Read, Refusal
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.description_json import encode_engine_json, to_engine_json
from kvferry.protocol.geometry import Range
from tests.cli.command import refused, run
from tests.cli.plan.forms import DENSE, read_pair
from tests.cli.plan.test_prediction import DENSE_OF_NHD, NHD, placings, summary_of
from tests.draws import draws
from tests.fuzz.mutation import Source, mutate

EIGHT = f"{DENSE},tp=8".replace("heads=4", "heads=8")
FOUR = EIGHT.replace("tp=8", "tp=4")


def test_the_staging_pool_has_the_default_size_of_a_worker() -> None:
    pool = pytest.importorskip("kvferry.worker.staging.pool").StagingPool
    worker = pytest.importorskip("kvferry.worker.worker_memory")
    assert worker.STAGING_BYTES == POOL_BYTES_VRAM
    assert worker.STAGING_BYTES_ON_HOST == POOL_BYTES_DRAM
    for size in (POOL_BYTES_VRAM, POOL_BYTES_DRAM, 1 << 20, 3_333_333):
        assert longest_staged_run(size) == pool(size).largest_wave // 2


@pytest.mark.parametrize(
    ("option", "direct", "staged"),
    [("--staging-pool-bytes", "0", "1048576"), ("--direct-min-bytes", "64", "65")],
)
def test_without_a_staging_pool_or_with_short_direct_runs_nothing_is_staged(
    option: str, direct: str, staged: str
) -> None:
    for value, placing in ((direct, "direct"), (staged, "staged")):
        assert placings(summary_of(NHD, DENSE_OF_NHD, option, value)) == {placing}


def test_the_prompt_is_as_long_as_the_smaller_cache_allows() -> None:
    assert summary_of(DENSE, f"{DENSE},tp=2").tokens == 63 * 16
    latent = ("layers=1,mla=8", "layers=1,mla=8")
    assert summary_of(*latent).tokens == 8192
    assert summary_of(*latent, "--tokens", "9000").tokens == 9000
    said = refused("plan", DENSE, DENSE, "--tokens", "1009")
    limit = "expected at most 1008: the consumer's cache holds no more\n"
    assert f"--tokens is 1009; {limit}" in said


def test_a_refused_pair_has_all_its_reasons_and_exit_code_1() -> None:
    arguments = [DENSE.replace("heads=4", "heads=3"), f"{DENSE},window=64"]
    table, reported = run("plan", *arguments), run("plan", *arguments, "--json")
    assert (table.code, table.err, reported.code, reported.err) == (1, "", 1, "")
    refusal = msgspec.json.decode(reported.out, type=Refusal)
    assert not refusal.workable
    producer, consumer = read_pair(*arguments)
    with pytest.raises(PlanRefused) as refused:
        plan_engine(consumer, producer)
    assert refusal.reasons == refused.value.reasons
    words = " ".join(table.out.split())
    for one in refusal.reasons:
        both = f"producer: {one.producer} consumer: {one.consumer}"
        assert f"{one.field} {both} → {one.change}" in words


def test_a_description_json_may_come_from_a_file_or_from_standard_input(
    tmp_path: Path,
) -> None:
    producer, _ = read_pair(EIGHT, FOUR)
    engine_json = encode_engine_json(to_engine_json(producer))
    path = tmp_path / "a=b.json"
    path.write_bytes(engine_json)
    wanted = run("plan", EIGHT, FOUR).out
    assert run("plan", str(path), FOUR).out == wanted
    assert run("plan", "-", FOUR, stdin=engine_json).out == wanted
    said = refused("plan", f"{path},tp=2", FOUR)
    assert "expected no keys behind a description JSON" in said


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["tables", "JSON"])
def test_names_of_a_description_reorder_nothing_on_a_terminal(
    tmp_path: Path, form: list[str]
) -> None:
    name = "e\u202edeliaf\u2066\u200b\U000e0041"
    producer, _ = read_pair(EIGHT, FOUR)
    renamed = msgspec.structs.replace(producer, engine_id=name)
    path, picture = tmp_path / "renamed.json", tmp_path / "plan.svg"
    path.write_bytes(encode_engine_json(to_engine_json(renamed)))
    ran = run("plan", str(path), str(path), "--svg", str(picture), *form)
    assert ran.code == 0, ran.err
    for shown in (ran.out, picture.read_text()):
        assert shown.replace("\n", "").isprintable()
    assert "\\u202e" in ran.out
    if form:
        assert name in json.dumps(json.loads(ran.out), ensure_ascii=False)


def test_a_short_form_beside_a_description_json_is_judged_by_its_geometry_alone(
    tmp_path: Path,
) -> None:
    producer, _ = read_pair(EIGHT, FOUR)
    facts = {"model": "m", "fingerprint": "w", "dtype": "half", "speculative": "eagle"}
    changed = msgspec.structs.replace(producer.facts, **facts)
    named = msgspec.structs.replace(producer, facts=changed)
    path = tmp_path / "producer.json"
    path.write_bytes(encode_engine_json(to_engine_json(named)))
    assert run("plan", str(path), FOUR).code == 0
    assert run("plan", FOUR, str(path)).code == 0
    refused = run("plan", str(path), f"{FOUR},kv=apart".replace("dim=8", "dim=4"))
    assert refused.code == 1
    assert "cell_bytes producer: 16 consumer: 8 " in " ".join(refused.out.split())


def test_the_json_has_exactly_the_fields_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    section = page.partition("## `--json`")[2].partition("\n## ")[0]
    plain = json.loads(run("plan", EIGHT, FOUR, "--json").out)
    worker = plain["workers"][0]
    flow = worker["flows"][0]
    assert set(flow) == set(Flow.__struct_fields__)
    assert set(flow["reads"][0]) == set(Read.__struct_fields__)
    side = plain["producer"]
    for holder in (plain, side, side["workers"][0], worker, flow, flow["reads"][0]):
        for name in holder:
            assert f"`{name}`" in section, name


def test_a_workers_heads_are_those_of_attention_else_of_states_else_channels() -> None:
    states = "layers=2,state_layers={},ssm=6x8,conv=x64,tp=2"
    for form, heads, on_the_second in (
        (states.format("0,heads=4,dim=8"), 4, Range(2, 4)),
        (states.format("*"), 6, Range(3, 6)),
        (states.format("*").replace("ssm=6x8,", ""), 64, Range(32, 64)),
    ):
        side = summary_of(form, form).consumer
        assert (side.heads, side.workers[1].heads) == (heads, on_the_second)


def test_a_terminal_gets_colours_and_a_pipe_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = run("plan", EIGHT, FOUR).out
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = run("plan", EIGHT, FOUR).out
    assert "\x1b[" not in plain
    assert "\x1b[32mdirect (1)\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == plain.split()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run("plan", EIGHT, FOUR).out


FORM_OF_JSON = "layers=3,heads=4,dim=8,tp=2,blocks=8,window=40@1,state_layers=2,ssm=4x2,conv=x4+B2*"


@given(st.binary(min_size=4, max_size=64), st.booleans())
@settings(max_examples=draws(50))
def test_every_changed_description_json_ends_with_an_exit_code(
    decisions: bytes, is_producer: bool
) -> None:
    engine, _ = read_pair(FORM_OF_JSON, FORM_OF_JSON)
    plain = mutate(Source(decisions), msgspec.to_builtins(to_engine_json(engine)))
    arguments = ["-", FORM_OF_JSON] if is_producer else [FORM_OF_JSON, "-"]
    changed = json.dumps(plain).encode("utf-8", "surrogatepass")
    ran = run("plan", *arguments, stdin=changed)
    assert ran.code in (0, 1, 2)
    assert bool(ran.out) != bool(ran.err)
