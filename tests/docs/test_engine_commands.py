"""`vllm serve …` on the pages: vLLM's own parser takes it, and kvferry its configuration."""

from __future__ import annotations

import re
import shlex

from scripts.doc_commands import checked_by, of_repository
from tests.deploy.judging import judge_transfer_config, parsed_by_vllm
from tests.deploy.launches import Launch
from tests.docs.shell import value_of

TYPED = checked_by("tests/docs/test_engine_commands.py::test_vllm_and_kvferry_take_the_command_line")


_DOCKER = checked_by("tests/docs/test_platforms.py::test_docker")
STARTED_BY_DOCKER = [command for command in _DOCKER if "--kv-transfer-config" in command.text]


def launch(text: str) -> Launch:
    """The command line that a command starts; an image's entry point is `vllm serve`."""
    words = shlex.split(text, comments=True)
    if words[0] == "docker":
        words = ["vllm", "serve", *words[words.index("kvferry") + 1 :]]
    return Launch("documentation", tuple(words), {}, 0.0)


def test_every_start_of_an_engine_is_among_them() -> None:
    starts = [each for each in of_repository() if re.match(r"(\w+=\S+ )*vllm serve\b", each.text)]
    run = [each for each in starts if each.check is not None and each.check.test.startswith("tests/vllm/")]
    assert [each for each in starts if each not in run] == TYPED
    assert len(TYPED) >= 3
    assert STARTED_BY_DOCKER


def test_vllm_and_kvferry_take_the_command_line() -> None:
    launches = [launch(command.text) for command in (*TYPED, *STARTED_BY_DOCKER)]
    roles = [judge_transfer_config(value_of(each.words, "--kv-transfer-config"))[0] for each in launches]
    lines = [line.split() for line in parsed_by_vllm(launches)]
    assert [(line[0], *line[3:]) for line in lines] == [
        (each.words[2], role, "recompute") for each, role in zip(launches, roles, strict=True)
    ]
