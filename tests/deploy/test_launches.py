"""Command lines, configurations, variables, ports and times of deploy/, for every tool that starts engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from vllm_router.launch_router import parse_router_args

from tests.deploy.judging import judge_transfer_config, parsed_by_vllm
from tests.deploy.launches import LAUNCHES, Launch
from tests.docs.commands import typed

pytestmark = pytest.mark.slow

ENGINES = [launch for launch in LAUNCHES if launch.is_engine]
ROUTERS = [launch for launch in LAUNCHES if not launch.is_engine]


def documented() -> list[Launch]:
    """Starts of engines and routers on the pages; images have these as their entry points."""
    found = [
        command.words
        for command in typed("vllm")
        if "--kv-transfer-config" in command.words
    ]
    for program, image in (
        (("vllm", "serve"), "kvferry"),
        (("vllm-router",), "kvferry-router"),
    ):
        for command in typed("docker"):
            words = (
                command.words[command.words.index(image) + 1 :]
                if image in command.words
                else ()
            )
            found += (
                [(*program, *words)]
                if len(words) > 1 and command.words[1] == "run"
                else []
            )
    return [Launch("documentation", words, {}, 0.0) for words in found]


DOCUMENTED = documented()


def by_source(launches: Sequence[Launch]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "launch", launches, ids=[launch.source for launch in launches]
    )


def role_of(launch: Launch) -> str:
    return judge_transfer_config(launch.option("--kv-transfer-config"))[0]


def test_vllm_understands_every_engines_command_line() -> None:
    of_pages = [launch for launch in DOCUMENTED if launch.is_engine]
    assert len(of_pages) >= 2
    understood = [line.split() for line in parsed_by_vllm([*ENGINES, *of_pages])]
    for launch, line in zip(ENGINES, understood, strict=False):
        assert line == [
            launch.words[2],
            launch.option("--port"),
            "300",
            role_of(launch),
            "recompute",
        ]
    for launch, line in zip(of_pages, understood[len(ENGINES) :], strict=True):
        assert (line[0], *line[3:]) == (launch.words[2], role_of(launch), "recompute")


@by_source(ENGINES)
def test_an_engine_has_the_role_of_its_pool(launch: Launch) -> None:
    pool = "kv_producer" if "prefill" in launch.source else "kv_consumer"
    both = launch.source.startswith("llm-d prefixes ")
    assert role_of(launch) == ("kv_both" if both else pool)


@by_source([*ROUTERS, *(launch for launch in DOCUMENTED if not launch.is_engine)])
def test_the_router_understands_its_command_line(launch: Launch) -> None:
    router = parse_router_args(list(launch.words[1:]))
    assert (router.vllm_pd_disaggregation, router.kv_connector) == (True, "nixl")
    assert router.host == (
        "127.0.0.1" if launch.source == "documentation" else "0.0.0.0"
    )
    assert router.port == 30000
    assert router.prefill_urls
    assert router.decode_urls


@by_source(ENGINES)
def test_decoders_get_an_address_that_they_can_reach(launch: Launch) -> None:
    assert launch.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] in (
        "status.podIP",
        "10.0.0.1",
    )
    assert launch.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert launch.environment["KVFERRY_SECRET_FILE"] == "/etc/kvferry/secrets"


def test_a_documented_engine_that_others_read_from_over_the_network_has_a_secret() -> (
    None
):
    """Without one, decoders on other hosts do not read from it."""
    words = [
        command.words
        for command in typed("docker")
        if "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1" in command.words
    ]
    assert words
    for line in words:
        assert any(word.startswith("KVFERRY_SECRET_FILE=") for word in line)


@by_source(ENGINES)
def test_an_engine_has_time_to_drain(launch: Launch) -> None:
    """The router's longest request, and then a lease, before vLLM gives up; and that before the platform kills."""
    lease_s = judge_transfer_config(launch.option("--kv-transfer-config"))[
        1
    ].kv_lease_duration
    request_s = max(
        float(router.option("--request-timeout-secs")) for router in ROUTERS
    )
    drain_s = float(launch.option("--shutdown-timeout"))
    assert request_s + lease_s <= drain_s
    assert drain_s + 20 <= launch.grace_s
