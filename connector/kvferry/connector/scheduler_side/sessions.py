"""Sessions of streamed input: what becomes of params on later parts of their input.

vLLM tells a connector of a session's first part alone. A later one replaces the session's sampling parameters, and with
them come params that nothing reads: a producer would hold the prompt until its lease runs out, and no counter would say
so. So the parameters are compared whenever a part gets its blocks, and when the session ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Session:
    """One session: the params of its first part, and the sampling parameters that were looked at last."""

    def __init__(self, request: Request) -> None:
        self._first_params = _params_of(request.sampling_params)
        self._last_seen: object = request.sampling_params

    def take_new_params(self, request: Request) -> list[Any]:
        """The params that have come with the latest part of a session's input, each once."""
        return self._new_among([request.sampling_params])

    def take_last_params(self, request: Request) -> list[Any]:
        """The params that have come with the last parts of a session that has ended."""
        sampling_params: list[object] = [request.sampling_params]
        # Parts that vLLM never got to: they wait in its queue when a session is aborted.
        queued = request.streaming_queue or ()
        sampling_params.extend(
            getattr(part, "sampling_params", None) for part in queued
        )
        return self._new_among(sampling_params)

    def _new_among(self, sampling_params: list[object]) -> list[Any]:
        new: list[Any] = []
        for part in sampling_params:
            # By identity: vLLM keeps the last part's object until the next part has its blocks.
            if part is None or part is self._last_seen:
                continue
            self._last_seen = part
            params = _params_of(part)
            if params is not None and not self._repeats_first(params):
                new.append(params)
        return new

    def _repeats_first(self, params: Any) -> bool:
        """True if vLLM has repeated the first part's parameters: it does where a later part has none of its own."""
        try:
            return bool(params == self._first_params)
        except RecursionError:
            # A client's lists may be nested as deep as a message can hold.
            return False


def _params_of(sampling_params: Any) -> Any:
    extra_args = getattr(sampling_params, "extra_args", None)
    if not isinstance(extra_args, dict):
        return None
    return extra_args.get("kv_transfer_params")
