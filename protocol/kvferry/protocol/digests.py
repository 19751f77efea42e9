"""A chain of digests over everything that determines a prompt's KV cache.

A `kv_transfer_params` object can arrive with another prompt than its own: all prompts of a batched request get the same
object, and the next turn of a conversation is tokenised again. So the producer sends digests of the tokens in its
blocks, and the consumer loads only the prefix that both prompts share. (vLLM's own connector answered the second prompt
of a batch from the first one's cache, and its prefix cache stayed poisoned.)

Prefix: both schedulers find what their prompts share, without an exchange of tokens.

    producer's scheduler                                              consumer's scheduler
    `digest_chain` of the tokens in its blocks
    Ticket{digests, held_from, …}  ──── router, or Answers{…} ──────► `shared_tokens` of its own prompt
                                                                      LoadOrder{first_token, stop_token, …} of what is
                                                                      shared, and not in its prefix cache already

    d[-1] = H("identity", lora, salt, weights)        start, one per adapter, cache salt and version of the weights
    d[i]  = H("chunk", d[i-1], media in chunk i, tokens of chunk i)

`H` is BLAKE2b with 16 bytes of output and the personalisation `kvferry-digest-1`. A chunk is 256 tokens, the last one
has the remaining 1 to 256, so `n` tokens have `ceil(n / 256)` digests. `weights` is absent for the weights of the
start. Golden vectors: `tests/protocol/test_digests.py`.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 256
DIGEST_BYTES = 16
TOKEN_BYTES = 4

_PERSON = b"kvferry-digest-1"


class UncoveredToken(ValueError):
    """A token id that no digest covers. Whoever sends token ids can choose them: an engine without a tokenizer does not
    check them (`--skip-tokenizer-init`)."""


@dataclass(frozen=True, slots=True)
class Media:
    """A multimodal item: its placeholder starts at token `offset`, covers `length` tokens and hashes to `content`."""

    offset: int
    length: int
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything that determines the KV cache of a sequence: its tokens, and the model's other inputs.

    Attributes:
        tokens: token ids, each in [0, 2**32).
        lora: digest of the LoRA adapter's content, or None. Its name does not matter.
        salt: vLLM's `cache_salt`, or None.
        media: multimodal items in order of their offset.
        weights: version of weights that were updated at run time, as named by an operator; empty for those of the
            start.
    """

    tokens: Sequence[int]
    lora: str | None = None
    salt: str | None = None
    media: tuple[Media, ...] = ()
    # The weights of the start need no name here: the fingerprint of the model covers them, at the handshake.
    weights: str = ""


def digest_chain(prompt: Prompt, num_tokens: int | None = None) -> tuple[str, ...]:
    """The digests of the first `num_tokens` tokens (default: all), as lowercase hexadecimal text.

    Raises:
        ValueError: a token id outside [0, 2**32), or `num_tokens` beyond the prompt.
    """
    if num_tokens is None:
        num_tokens = len(prompt.tokens)
    return tuple(_digests(prompt, _identity(prompt), 0, num_tokens))


class GrowingChain:
    """The digests of a prompt, made part by part: those of a long one take half a millisecond."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._digest = _identity(prompt)
        self._whole: list[str] = []

    @property
    def num_tokens(self) -> int:
        """The tokens of the whole chunks whose digests are made."""
        return len(self._whole) * CHUNK_TOKENS

    @property
    def prompt(self) -> Prompt:
        """What the digests are of."""
        return self._prompt

    def grow(self, num_tokens: int) -> None:
        """Make the digests of the whole chunks within the first `num_tokens` tokens."""
        start = len(self._whole) * CHUNK_TOKENS
        stop = num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
        if stop > start:
            self._whole += _digests(self._prompt, self._digest, start, stop)
            self._digest = bytes.fromhex(self._whole[-1])

    def adopt(self, chain: Sequence[str], num_tokens: int) -> None:
        """Take digests that are made already: those of a prompt that begins with the same `num_tokens` tokens."""
        whole = chain[: num_tokens // CHUNK_TOKENS]
        if len(whole) > len(self._whole):
            self._whole = list(whole)
            self._digest = bytes.fromhex(whole[-1])

    def digests(self, num_tokens: int) -> tuple[str, ...]:
        """The same as `digest_chain`, of at least as many tokens as before.

        Raises:
            ValueError: as `digest_chain`.
        """
        self.grow(num_tokens)
        start = len(self._whole) * CHUNK_TOKENS
        rest = _digests(self._prompt, self._digest, start, num_tokens)
        return (*self._whole, *rest)

    def last_digest(self, num_tokens: int) -> str:
        """The last of `digests(num_tokens)`, without making a tuple of all of them.

        Raises:
            ValueError: as `digest_chain`; no tokens.
        """
        self.grow(num_tokens)
        whole, more = divmod(num_tokens, CHUNK_TOKENS)
        if more:
            start = whole * CHUNK_TOKENS
            (last,) = _digests(self._prompt, self._digest, start, num_tokens)
            return last
        if whole <= 0:
            raise ValueError(f"{num_tokens} tokens have no digest")
        return self._whole[whole - 1]

    def encoded(self, num_tokens: int) -> bytes:
        """The digests of the whole chunks within the first `num_tokens` tokens as a query has them: `grow` has made
        them."""
        return bytes.fromhex("".join(self._whole[: num_tokens // CHUNK_TOKENS]))

    def shared_tokens(self, chain: Sequence[str], num_tokens: int) -> int:
        """As the function `shared_tokens`, without making the digests that are made already."""
        num_here = min(num_tokens, len(self._prompt.tokens))
        self.grow(num_here)
        # It may have grown further: then the last digest, of a part of a chunk, begins where that chunk does.
        own = self._whole[: num_here // CHUNK_TOKENS]
        start = len(own) * CHUNK_TOKENS
        if start < num_here:
            before = bytes.fromhex(own[-1]) if own else _identity(self._prompt)
            own += _digests(self._prompt, before, start, num_here)
        shared = 0
        for expected, digest in zip(chain, own, strict=False):
            stop = min(shared + CHUNK_TOKENS, num_tokens)
            if stop > num_here or digest != expected:
                break
            shared = stop
        return shared


def shared_tokens(prompt: Prompt, chain: Sequence[str], num_tokens: int) -> int:
    """The number of leading tokens of `prompt` that a sequence of `num_tokens` tokens with these digests shares.

    Returns:
        `num_tokens` or a multiple of `CHUNK_TOKENS`: the last boundary up to which every digest is equal.

    Example: 300 equal tokens, then a difference; `num_tokens` 700: boundaries 256, 512, 700; the answer is 256.
    """
    num_here = min(num_tokens, len(prompt.tokens))
    own = _digests(prompt, _identity(prompt), 0, num_here)
    shared = 0
    # The chain may be longer than the local prompt, or shorter.
    for expected, digest in zip(chain, own, strict=False):
        stop = min(shared + CHUNK_TOKENS, num_tokens)
        if stop > num_here or digest != expected:
            break
        shared = stop
    return shared


_EMPTY = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_PERSON)
_LENGTH = struct.Struct("<Q")
_MEDIA = struct.Struct("<QQQ")


def _counted(part: bytes) -> bytes:
    # Every part of variable length is preceded by its length, so no two inputs share an encoding.
    return _LENGTH.pack(len(part)) + part


# The beginning of every chunk's message is hashed once, here: a copy of a state costs half of a new one.
_CHUNK = _EMPTY.copy()
_CHUNK.update(_counted(b"chunk") + _LENGTH.pack(DIGEST_BYTES))
_WHOLE_CHUNK = _counted(b"") + _LENGTH.pack(CHUNK_TOKENS * TOKEN_BYTES)
"""The bytes between the digest of the chunk before and the tokens of a whole chunk without media."""


def _identity(prompt: Prompt) -> bytes:
    """The digest before that of the first chunk."""
    texts = [prompt.lora, prompt.salt]
    if prompt.weights:
        texts.append(prompt.weights)
    state = _EMPTY.copy()
    state.update(_counted(b"identity"))
    for text in texts:
        part = b""
        if text is not None:
            # The sign tells an empty text from none.
            part = b"=" + text.encode("utf-8", "surrogatepass")
        state.update(_counted(part))
    return state.digest()


def _digests(prompt: Prompt, digest: bytes, start: int, stop: int) -> Iterator[str]:
    """Yield the digest of each chunk of the tokens `[start, stop)` in turn: of `CHUNK_TOKENS` each, the last of the
    rest.

    Args:
        digest: of the chunk before.
        start: a multiple of `CHUNK_TOKENS`.

    Raises:
        ValueError: a token id outside [0, 2**32), or `stop` beyond the prompt.
    """
    if not 0 <= start <= stop <= len(prompt.tokens):
        raise ValueError(
            f"num_tokens is {stop}; expected {start} to {len(prompt.tokens)}"
        )
    chosen = prompt.tokens
    if stop - start < len(chosen):
        chosen = chosen[start:stop]
    tokens = _as_uint32(chosen)
    for first in range(start, stop, CHUNK_TOKENS):
        end = min(first + CHUNK_TOKENS, stop)
        chunk = tokens[first - start : end - start]
        between = _WHOLE_CHUNK
        if prompt.media or end - first < CHUNK_TOKENS:
            between = _encoded_media(prompt.media, first, end)
            between += _LENGTH.pack(chunk.nbytes)
        state = _CHUNK.copy()
        state.update(digest + between)
        state.update(chunk)
        digest = state.digest()
        yield digest.hex()


def _encoded_media(media: tuple[Media, ...], start: int, stop: int) -> bytes:
    """The items that cover any of the tokens `[start, stop)`, as bytes."""
    encoded = bytearray()
    for item in media:
        if item.offset < stop and start < item.offset + item.length:
            content = item.content.encode("utf-8", "surrogatepass")
            encoded += _MEDIA.pack(item.offset, item.length, len(content))
            encoded += content
    return _counted(bytes(encoded))


def _as_uint32(tokens: Sequence[int]) -> memoryview:
    """The tokens as unsigned integers of four bytes, little-endian.

    Raises:
        UncoveredToken: a token id outside [0, 2**32).
    """
    # `array` is five times as fast as numpy here, twice as fast from a list as from other sequences, and refuses ids
    # that do not fit.
    ids = array("I")
    if not isinstance(tokens, list):
        tokens = list(tokens)
    try:
        ids.fromlist(tokens)
    except OverflowError:
        raise UncoveredToken("a token id is outside [0, 2**32)") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return memoryview(ids)
