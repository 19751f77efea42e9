"""The index of prompts: how a query finds its prompt, and what that costs the engine's thread."""

from __future__ import annotations

import pytest

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.queries import PromptQuery
from kvferry.scheduler.producer.prompt_directory import PromptIndex
from kvferry.scheduler.requests import ListedPrompt

KEY = "a-request"


def query_of(prompt: Prompt) -> PromptQuery:
    return PromptQuery(
        number=1,
        key=KEY,
        num_tokens=len(prompt.tokens),
        digest=digest_chain(prompt)[-1],
    )


@pytest.mark.parametrize(("num_tokens", "pauses"), [(4096, 0), (12_289, 3)])
def test_a_long_prompt_is_digested_in_parts_with_pauses(
    num_tokens: int, pauses: int
) -> None:
    # Digesting a prompt of 32,000 tokens takes milliseconds, for which the step thread would wait for Python's lock.
    called: list[None] = []
    index = PromptIndex(pause=lambda: called.append(None))
    prompt = Prompt(tokens=list(range(num_tokens)))
    listed = ListedPrompt("p0", KEY, prompt, num_tokens)
    index.add(listed)
    assert called == [], "nothing is digested before a query comes"

    assert index.claim(("client", 1), query_of(prompt)) is listed
    assert len(called) == pauses


def test_a_prompt_with_a_token_that_no_digest_covers_is_found_by_no_query() -> None:
    index = PromptIndex(pause=lambda: None)
    uncovered = ListedPrompt("p0", KEY, Prompt(tokens=[5, -1, 7]), 3)
    index.add(uncovered)
    query = query_of(Prompt(tokens=[5, 6, 7]))
    assert index.claim(("client", 1), query) is None
    same_length = ListedPrompt("p1", KEY, Prompt(tokens=[5, 6, 7]), 3)
    index.add(same_length)
    assert index.claim(("client", 1), query) is same_length
    index.drop(uncovered)
    index.drop(same_length)
    assert not index.keys()
