"""Checks for every launch, by any tool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvferry.connector.config import FerryConfig, check_role, read_config
from tests.deploy.launches import Launch

KNOWN_TO_TRANSFER_CONFIG = {
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
}
_PARSE_ENGINES = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(parsed)
    config = parsed.kv_transfer_config
    print(parsed.model_tag, parsed.port, parsed.shutdown_timeout, config.kv_role, config.kv_load_failure_policy)
"""


def judge_transfer_config(text: str) -> tuple[str, FerryConfig]:
    """The role and kvferry's configuration.

    Raises:
        AssertionError: kvferry would not be loaded, or a failed load would end a request.
        InvalidConfig: kvferry would stop the start.
    """
    config = json.loads(text)
    assert set(config) <= KNOWN_TO_TRANSFER_CONFIG
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "NixlConnector",
        "kvferry.connector",
    )
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    assert config["kv_load_failure_policy"] == "recompute"
    found = read_config(config.get("kv_connector_extra_config", {}))
    check_role(found, config["kv_role"])
    return config["kv_role"], found


def parsed_by_vllm(launches: Sequence[Launch]) -> list[str]:
    """Results of vLLM's own parser for `vllm serve …` lines, in a process of its own.

    Raises:
        AssertionError: it refuses one.
    """
    lines = [launch.words[2:] for launch in launches]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE_ENGINES],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        line for line in done.stdout.splitlines() if re.search(r" kv_\w+ \w+$", line)
    ]


def programs() -> Path:
    """Where this environment's programs are."""
    return Path(sys.executable).parent
