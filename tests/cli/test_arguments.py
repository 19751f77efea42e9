"""Options and arguments that a command refuses: one line that names the argument, its value and what was expected."""

from __future__ import annotations

import pytest

from kvferry.cli.arguments import InvalidArgument, read_address
from tests.cli.command import refused
from tests.cli.plan.forms import DENSE

PLAN = ("plan", DENSE, DENSE)
DESCRIBE = ("describe", "127.0.0.1:1", "--timeout")
BAD: list[tuple[tuple[str, ...], str]] = [
    (
        ("plan", "nothing.json", DENSE),
        "PRODUCER is 'nothing.json'; expected layers=…,",
    ),
    (("plan", DENSE, "nothing"), "CONSUMER is 'nothing'; expected layers=…,"),
    (("plan", "./nothing.json", DENSE), "PRODUCER is './nothing.json'; expected "),
    (("plan", "nothing.json", DENSE), "; there is none, and nothing is downloaded\n"),
    (
        ("plan",),
        "the following arguments are required: PRODUCER, CONSUMER; see kvferry plan --help\n",
    ),
    (
        (*PLAN, "--token\n", "5"),
        "unrecognized arguments: --token\\n 5; see kvferry plan --help\n",
    ),
    (
        (*PLAN, "--tokens"),
        "argument --tokens: expected one argument; see kvferry plan --help\n",
    ),
    (("plan", "-", "-"), "CONSUMER is '-'; expected another source"),
    (
        ("plan", "-", DENSE),
        "PRODUCER: description JSON: description is b''; expected JSON",
    ),
    (
        ("plan", "/", DENSE),
        "PRODUCER is '/config.json'; expected a file that can be read",
    ),
    (
        ("plan", "meta-llama/None,tp=2", DENSE),
        "PRODUCER is 'meta-llama/None'; expected layers=…,",
    ),
    (
        ("plan", "../no-model,tp=2", DENSE),
        "PRODUCER is '../no-model'; expected layers=…,",
    ),
    (
        ("plan", "tp=4", "tp=2"),
        "PRODUCER: layers is missing; expected the number of layers",
    ),
    (
        ("plan", DENSE, "layers=2,heads=3"),
        "CONSUMER: dim is missing; expected heads and dim",
    ),
    (
        ("plan", DENSE, "layers=2,head=3"),
        "CONSUMER: key is 'head'; did you mean heads?\n",
    ),
    ((*PLAN, "--tokens", "0"), "--tokens is '0'; expected a whole number from 1"),
    ((*PLAN, "--link", "nan"), "--link is 'nan'; expected a number from"),
    ((*PLAN, "--direct-min-bytes", "0"), "--direct-min-bytes is '0'"),
    ((*PLAN, "--staging-pool-bytes=-1"), "--staging-pool-bytes is '-1'"),
    ((*PLAN, "--out", "x"), "--out is 'x'; expected --copies with it"),
    *(
        ((*PLAN, option, ""), f"{option} is ''; expected ")
        for option in ("--svg", "--out")
    ),
    ((*PLAN, "--copies", ""), "file is ''; expected a file that can be read"),
    (
        (*PLAN, "--svg", "/nowhere/x.svg"),
        "--svg is '/nowhere/x.svg'; expected a file that can be written",
    ),
    *(
        ((*DESCRIBE, t), f"--timeout is '{t}'; expected a number from 0.1 to 600")
        for t in ("0", "nan", "soon", "601")
    ),
    (("bench",), "--listen is missing; expected --listen, or --connect HOST[:PORT]"),
    (
        ("bench", "--listen", "--connect", "a"),
        "--connect is 'a'; expected no --connect beside",
    ),
    (
        (*PLAN, "--tokens", "8", "--tokens", "9"),
        "argument --tokens: expected once; see kvferry",
    ),
    (
        ("trace", ".", "-o", "a.json", "--out", "b.json"),
        "argument -o/--out: expected once",
    ),
    (("bench", "--connect", "a:0"), "--connect is 'a:0'; expected host:port"),
    (("bench", "--listen", ""), "--listen is ''; expected host:port"),
    (("bench", "--connect", "a", "--max-size", "5K"), "--max-size"),
    (("bench", "--connect", "a", "--device", "gpu"), "--device"),
    (("bench", "--connect", "a", "--seconds", "0"), "--seconds"),
    (("bench", "--connect", "a", "--timeout", "nan"), "--timeout"),
    (("doctor", "--data-parallel-size", "0"), "--data-parallel-size is '0'"),
    (("doctor", "--timeout", "soon"), "--timeout is 'soon'"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=range(len(BAD)))
def test_an_argument_that_is_refused_is_named_in_one_line(
    arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a-b.c:5600", ("a-b.c", 5600)),
        ("[::1]:1", ("::1", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert read_address("HOST:PORT", text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "::1:5",
        "tcp://a:1",
        "a b:1",
        "a:²",
        "a:-1",
        "[a",
    ],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        read_address("HOST:PORT", text)
