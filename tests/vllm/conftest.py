"""Real vLLM engines on the CPU, started once for all tests that can share them.

All are forked (`forked_server`), which takes seconds.
Nothing is mocked.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.accuracy.model import prepare
from scripts.accuracy.settings import TINY_MODEL
from tests.needs_vllm import LEFT_OUT
from tests.vllm.forked_server import ForkedServer
from tests.vllm.pair import ServerPair

START_S = 300.0

if importlib.util.find_spec("torch"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("transformers")

collect_ignore_glob = LEFT_OUT


def model_folder(name: str) -> str:
    """A model as a folder that vLLM can load, made when it is not there."""
    cache = Path(os.environ.get("KVFERRY_CACHE_DIR", "~/.cache/kvferry")).expanduser()
    return prepare(name, cache, print)


@pytest.fixture(scope="session")
def model() -> Path:
    """A small Llama of random weights, with the tokenizer of SmolLM2."""
    return Path(model_folder(TINY_MODEL))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines log."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def pair(model: Path, logs: Path) -> Iterator[ServerPair]:
    """A producer and a consumer, both kvferry, with `recompute`."""
    # Short, yet longer than a busy machine takes from an answer to the next request.
    short = {"kv_lease_duration": 12.0}
    debug = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SERVER_DEV_MODE": "1"}
    tools = (
        "--trust-request-chat-template",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    )
    transfer = Transfer("kv_producer", extra_config=short)
    prefill = EngineSpec(
        "prefill", str(model), transfer=transfer, extra_args=tools, extra_env=debug
    )
    decode = EngineSpec(
        "decode",
        str(model),
        devices=("1",),
        # A machine that is busy with other engines must not decide.
        transfer=Transfer("kv_consumer", extra_config={"handshake_timeout_s": 15}),
        extra_args=tools,
        extra_env=debug,
    )
    with ExitStack() as running:
        producer, consumer = (
            running.enter_context(ForkedServer(spec, logs))
            for spec in (prefill, decode)
        )
        for engine in (producer, consumer):
            engine.wait_ready(START_S)
        yield ServerPair(producer, consumer)
