"""Requests of every kind, with their legs in turn and at once: answered as by one engine, and each prompt token is
transferred, found or computed as the table of `docs/what-is-transferred.md` says."""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.engines import EngineSpec, Router, Transfer
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.settings import ROOT
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer
from tests.vllm.model_extras import IMAGE_PIXELS, multimodal
from tests.vllm.pair import TIMEOUT_S, Params, ServerPair, long_prompt, post
from tests.waiting import wait_until

PAGE = ROOT / "docs" / "what-is-transferred.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: Params = {"model": "model", "max_tokens": 8, "temperature": 0}
SAMPLED: Params = BODY | {"temperature": 0.7, "seed": 5}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ m.tool_calls | default('') }}\n{% endfor %}"
)
WORDS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for part in m.content %}{{ part.text | default('') }} {% endfor %}{% endif %}{% endfor %}"
)
"""The chat template of a tokenizer that has words only."""

_numbers = count(100)


@dataclass(frozen=True)
class Kind:
    """Requests of one kind.

    Attributes:
        body: of one whose prompt begins with this number.
        before: how many times it is sent before it is measured.
    """

    path: str
    body: Callable[[str], Params]
    before: int = 0


def completion(**more: Any) -> Kind:
    return Kind(COMPLETIONS, lambda name: BODY | {"prompt": long_prompt(name)} | more)


def chat(**more: Any) -> Kind:
    return Kind(CHAT, lambda name: BODY | {"messages": _said(long_prompt(name))} | more)


def tools(*history: Params, **more: Any) -> Kind:
    def body(name: str) -> Params:
        city = {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        }
        tool = {
            "description": f"{name}: the weather of a city",
            "name": "weather",
            "parameters": city,
        }
        messages = [*_said(long_prompt(name)), *history]
        offered = [{"type": "function", "function": tool}]
        return (
            BODY
            | {"messages": messages, "tools": offered, "chat_template": TEMPLATE}
            | more
        )

    return Kind(CHAT, body)


def _said(text: str) -> list[Params]:
    return [{"role": "user", "content": text}]


def _several(name: str) -> list[str]:
    return [long_prompt(f"{name}{letter}") for letter in "abc"]


NAMED = {"type": "function", "function": {"name": "weather"}}
RESULT: list[Params] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 degrees"},
]
KINDS = {
    "completion": completion(stream=True),
    "the same prompt again": Kind(COMPLETIONS, completion().body, before=1),
    "`n: 3`": completion(**SAMPLED, n=3),
    "a list of 3 prompts": Kind(
        COMPLETIONS, lambda name: BODY | {"prompt": _several(name)}
    ),
    "`echo`; `best_of` (vLLM ignores it)": completion(echo=True, best_of=3),
    "`logprobs`": completion(logprobs=2),
    "`prompt_logprobs`, `echo` with `logprobs`": completion(prompt_logprobs=1),
    "`use_beam_search`, two beams": completion(use_beam_search=True, n=2),
    "chat": chat(),
    "chat, `n: 3`": chat(**SAMPLED, n=3),
    "`tools`": tools(),
    "`tool_choice`: one function": tools(tool_choice=NAMED, max_tokens=40),
    "a tool's result in the history": tools(*RESULT),
    "`/v1/messages`": Kind(
        "/v1/messages", lambda name: BODY | {"messages": _said(long_prompt(name))}
    ),
    "`/v1/responses`": Kind(
        "/v1/responses",
        lambda name: {
            "model": "model",
            "input": long_prompt(name),
            "max_output_tokens": 8,
            "temperature": 0,
        },
    ),
}
TURNS = [
    "chat with an image",
    "its second turn, after an answer of 70 tokens",
    "its third turn",
    "its text, another image",
]
CELL, REASON = r"(\d+)(?:–(\d+))?", re.compile(r"\*(\w+)\*")


class Row(NamedTuple):
    """What the table says of a kind's tokens, and why some are computed: for one of these reasons."""

    tokens: list[str]
    reasons: set[str]


def rows() -> Iterator[tuple[str, str, Row]]:
    """The table, by request and legs."""
    request = ""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if len(cells) == 7 and re.fullmatch(CELL, cells[2]):
            request = REASON.sub("", cells[0]).strip(" ,") or request
            for legs in ("in turn", "at once") if cells[1] == "either" else (cells[1],):
                yield request, legs, Row(cells[2:], set(REASON.findall(cells[0])))


ROWS = {(request, legs): row for request, legs, row in rows()}


class Sender:
    """Sends requests with their legs in one way, and compares what becomes of their tokens with the table."""

    def __init__(self, pair: ServerPair, legs: str, router: str) -> None:
        self._pair, self._legs, self._router = pair, legs, router

    def send(self, request: str, path: str, body: Params) -> httpx.Response:
        """Send a request of a row. Its answer is that of one engine, and the decoder's when it is asked again."""
        before = self._pair.producer.metrics(), self._pair.consumer.metrics()
        answer = self.through(path, body)
        consumed = self._pair.consumer.metrics() - before[1]
        prompt = tokens(consumed)
        wait_until(
            lambda: tokens(self._pair.producer.metrics() - before[0]) > 0,
            "the producer has counted",
        )
        counts = [
            prompt,
            tokens(self._pair.producer.metrics() - before[0], "local_compute"),
            *(
                tokens(consumed, source)
                for source in (
                    "external_kv_transfer",
                    "local_cache_hit",
                    "local_compute",
                )
            ),
        ]
        reasons = set(
            consumed.by_label("vllm:kvferry_local_recomputes_total", "reason")
        )
        row = ROWS[request, self._legs]
        assert all(fits(*each) for each in zip(row.tokens, counts, strict=True)), (
            counts,
            row,
        )
        assert reasons <= row.reasons, (reasons, row)
        assert bool(reasons) == bool(row.reasons), (reasons, row)
        salted = body | {
            "cache_salt": "alone"
        }  # shares no cache with this request and its next turn
        alone = said(post(self._pair.producer.base_url, salted, path=path))
        assert (
            said(answer)
            == alone
            == said(post(self._pair.consumer.base_url, body, path=path))
        )
        return answer

    def through(self, path: str, body: Params) -> httpx.Response:
        """Send a request without a measurement."""
        if self._legs == "at once":
            return post(self._router, body, path=path)
        name = {"x-request-id": f"in-turn-{next(_numbers)}"}
        one = (
            {"max_output_tokens": 1}
            if path == "/v1/responses"
            else {"max_tokens": 1, "min_tokens": 1}
        )
        first = body | one | {"stream": False, "kv_transfer_params": ASK_FOR_PREFILL}
        answer = post(self._pair.producer.base_url, first, path=path, headers=name)
        assert answer.status_code == 200, answer.text
        params = answer.json().get("kv_transfer_params")
        return post(
            self._pair.consumer.base_url,
            body | {"kv_transfer_params": params},
            path=path,
            headers=name,
        )


def tokens(counted: Scrape, source: str = "") -> int:
    """Prompt tokens of one source, or of all."""
    return int(
        counted.total(
            "vllm:prompt_tokens_by_source_total",
            **({"source": source} if source else {}),
        )
    )


def fits(cell: str, number: int) -> bool:
    found = re.fullmatch(CELL, cell)
    return found is not None and int(found[1]) <= number <= int(found[2] or found[1])


def said(answer: httpx.Response) -> Any:
    """What an answer says, without ids and times."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [
            json.loads(line[6:])
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        return "".join(
            choice["text"] for event in events for choice in event["choices"]
        )
    found = answer.json()
    if "choices" not in found:
        return found.get("content") or [each["content"] for each in found["output"]]
    messages = [
        (each["index"], each.get("message") or each) for each in found["choices"]
    ]
    return [
        (
            index,
            each.get("text"),
            each.get("content"),
            [call["function"] for call in each.get("tool_calls") or ()],
        )
        for index, each in sorted(messages, key=lambda one: one[0])
    ]


@pytest.fixture(scope="module")
def seers(logs: Path) -> Iterator[ServerPair]:
    """A producer and a consumer of a model that sees one image."""

    def server(name: str, core: str) -> ForkedServer:
        transfer = Transfer(f"kv_{name}", extra_config={"handshake_timeout_s": 15})
        seeing: dict[str, Any] = {
            "max_model_len": 512,
            "extra_args": ("--trust-request-chat-template",),
        }
        spec = EngineSpec(
            f"seeing-{name}",
            str(multimodal()),
            devices=(core,),
            transfer=transfer,
            **seeing,
        )
        return running.enter_context(ForkedServer(spec, logs))

    with ExitStack() as running:
        pair = ServerPair(server("producer", "0"), server("consumer", "1"))
        for each in (pair.producer, pair.consumer):
            each.wait_ready(START_S)
        yield pair


def router_of(pair: ServerPair, logs: Path, path: str, body: Params) -> Iterator[str]:
    """A router that sends both legs at once from now on."""
    with Router(
        [pair.producer.base_url], [pair.consumer.base_url], logs, TIMEOUT_S
    ) as router:
        router.wait_ready(60)
        assert post(router.base_url, body, path=path).status_code == 200
        yield router.base_url


@pytest.fixture(scope="module")
def front(pair: ServerPair, logs: Path) -> Iterator[str]:
    yield from router_of(
        pair, logs, COMPLETIONS, BODY | {"prompt": long_prompt("Kinds")}
    )


@pytest.fixture(scope="module")
def seeing_front(seers: ServerPair, logs: Path) -> Iterator[str]:
    yield from router_of(
        seers, logs, CHAT, seen([{"role": "user", "content": [image(0), text(0, 20)]}])
    )


def image(seed: int) -> Params:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {
            "url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
        },
    }


def text(seed: int, words: int) -> Params:
    """Words of the small model's tokenizer, each one token."""
    return {
        "type": "text",
        "text": " ".join(
            f"w{each}" for each in np.random.default_rng(seed).integers(5, 999, words)
        ),
    }


def seen(messages: list[Params], answer: int = 8) -> Params:
    return BODY | {
        "messages": messages,
        "max_tokens": answer,
        "ignore_eos": True,
        "chat_template": WORDS,
    }


def test_the_table_has_every_kind_in_both_ways() -> None:
    assert {request for request, _ in ROWS} == {*KINDS, *TURNS}
    assert len(ROWS) == 2 * len({*KINDS, *TURNS})


@pytest.mark.parametrize("legs", ["in turn", "at once"])
@pytest.mark.parametrize("request_", KINDS)
def test_a_kind(pair: ServerPair, front: str, request_: str, legs: str) -> None:
    kind, sender = KINDS[request_], Sender(pair, legs, front)
    body = kind.body(f"{next(_numbers)}")
    for _ in range(kind.before):
        assert sender.through(kind.path, body).status_code == 200
    sender.send(request_, kind.path, body)


@pytest.mark.parametrize("legs", ["in turn", "at once"])
def test_turns_of_a_chat_with_an_image(
    seers: ServerPair, seeing_front: str, legs: str
) -> None:
    """In every turn the whole history is sent again: the producer never had the answers in it, which the decoder has
    generated; so it computes them, and the decoder finds them in its own cache."""
    sender, number = Sender(seers, legs, seeing_front), next(_numbers)
    history: list[Params] = []
    for turn, words in zip(TURNS[:3], (200, 40, 30), strict=True):
        content = [*([] if history else [image(number)]), text(number + words, words)]
        history += [{"role": "user", "content": content}]
        answer = sender.send(turn, CHAT, seen(history, 70))
        reply = answer.json()["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": reply}]
    sender.send(
        TURNS[3],
        CHAT,
        seen(
            [
                {
                    "role": "user",
                    "content": [image(number + 1), *history[0]["content"][1:]],
                }
            ]
        ),
    )
