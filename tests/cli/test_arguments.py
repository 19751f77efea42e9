"""Options and arguments that a command refuses: one line that names the argument, its value and what was expected."""

from __future__ import annotations

import shlex

import pytest

from kvferry.cli.arguments import InvalidArgument, read_address
from tests.cli.command import refused
from tests.cli.plan.forms import DENSE

# A command line, in which D is a short form, and a part of the error. `\n` is the end of a line, `\\n` is itself.
BAD = r"""
plan nothing.json D           | PRODUCER is 'nothing.json'; expected layers=…,
plan D nothing                | CONSUMER is 'nothing'; expected layers=…,
plan ./nothing.json D         | PRODUCER is './nothing.json'; expected
plan nothing.json D           | ; there is none, and nothing is downloaded\n
plan                          | the following arguments are required: PRODUCER, CONSUMER; see kvferry plan --help\n
plan D D "--token\n" 5        | unrecognized arguments: --token\\n 5; see kvferry plan --help\n
plan D D --tokens             | argument --tokens: expected one argument; see kvferry plan --help\n
plan - -                      | CONSUMER is '-'; expected another source
plan - D                      | PRODUCER: description JSON: description is b''; expected JSON
plan / D                      | PRODUCER is '/config.json'; expected a file that can be read
plan meta-llama/None,tp=2 D   | PRODUCER is 'meta-llama/None'; expected layers=…,
plan ../no-model,tp=2 D       | PRODUCER is '../no-model'; expected layers=…,
plan tp=4 tp=2                | PRODUCER: layers is missing; expected the number of layers
plan D layers=2,heads=3       | CONSUMER: dim is missing; expected heads and dim
plan D layers=2,head=3        | CONSUMER: key is 'head'; did you mean heads?\n
plan D D --tokens 0           | --tokens is '0'; expected a whole number from 1
plan D D --tokens 8 --tokens 9 | argument --tokens: expected once; see kvferry
plan D D --link nan           | --link is 'nan'; expected a number from
plan D D --direct-min-bytes 0 | --direct-min-bytes is '0'
plan D D --staging-pool-bytes=-1 | --staging-pool-bytes is '-1'
plan D D --out x              | --out is 'x'; expected --copies with it
plan D D --out ""             | --out is ''; expected
plan D D --svg ""             | --svg is ''; expected
plan D D --svg /nowhere/x.svg | --svg is '/nowhere/x.svg'; expected a file that can be written
plan D D --copies ""          | file is ''; expected a file that can be read
describe 127.0.0.1:1 --timeout 0    | --timeout is '0'; expected a number from 0.1 to 600
describe 127.0.0.1:1 --timeout nan  | --timeout is 'nan'; expected a number from 0.1 to 600
describe 127.0.0.1:1 --timeout soon | --timeout is 'soon'; expected a number from 0.1 to 600
describe 127.0.0.1:1 --timeout 601  | --timeout is '601'; expected a number from 0.1 to 600
bench                         | --listen is missing; expected --listen, or --connect HOST[:PORT]
bench --listen --connect a    | --connect is 'a'; expected no --connect beside
bench --connect a:0           | --connect is 'a:0'; expected host:port
bench --listen ""             | --listen is ''; expected host:port
bench --connect a --max-size 5K | --max-size
bench --connect a --device gpu  | --device
bench --connect a --seconds 0   | --seconds
bench --connect a --timeout nan | --timeout
trace . -o a.json --out b.json  | argument -o/--out: expected once
doctor --data-parallel-size 0 | --data-parallel-size is '0'
doctor --timeout soon         | --timeout is 'soon'
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_an_argument_that_is_refused_is_named_in_one_line(line: str) -> None:
    command, _, said = line.replace(r"\n", "\n").partition(" | ")
    arguments = [DENSE if word == "D" else word for word in shlex.split(command)]
    assert said.replace("\\\n", r"\n") in refused(*arguments)


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


INVALID = " a a: :1 a:0 a:65536 ::1:5 tcp://a:1 a·b:1 a:² a:-1 [a"


@pytest.mark.parametrize("text", INVALID.split(" "))
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        read_address("HOST:PORT", text.replace("·", " "))
