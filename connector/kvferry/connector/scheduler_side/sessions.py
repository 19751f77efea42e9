"""Sessions of streamed input: what becomes of params on later parts of their input.

vLLM tells a connector of a session's first part alone. A later one replaces the session's sampling parameters, and with
them come params that nothing reads: a producer would hold the prompt until its lease runs out, and no counter would say
so. So the parameters are compared whenever a part gets its blocks, and when the session ends: some parts may wait in
vLLM's queue then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Sessions:
    """The sessions that run."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._latest: dict[str, object] = {}

    def begun(self, request: Request) -> None:
        """A request has arrived; those that are no session are ignored."""
        if request.resumable:
            self._first[request.request_id] = _params_of(request.sampling_params)
            self._latest[request.request_id] = request.sampling_params

    def go_on(self, request: Request) -> list[Any]:
        """A request gets blocks. Returns the params that have come with its last part."""
        return (
            self._new(request, [request.sampling_params])
            if request.request_id in self._latest
            else []
        )

    def ended(self, request: Request) -> list[Any]:
        """A request has ended. Returns the params of its last part, and of those that it never got to."""
        if request.request_id not in self._latest:
            return []
        queued = (
            getattr(update, "sampling_params", None) for update in request.streaming_queue or ()
        )
        found = self._new(request, [request.sampling_params, *queued])
        del self._first[request.request_id], self._latest[request.request_id]
        return found

    def _new(self, request: Request, sampling: list[object]) -> list[Any]:
        found = []
        for parameters in sampling:
            if parameters is None or parameters is self._latest[request.request_id]:
                continue
            self._latest[request.request_id] = parameters
            params = _params_of(parameters)
            if params is not None and not _are_equal(params, self._first[request.request_id]):
                found.append(params)
        return found


def _are_equal(params: Any, first: Any) -> bool:
    """Whether vLLM has repeated the first part's parameters: it does where a later part has none of its own."""
    try:
        return bool(params == first)
    except RecursionError:  # a client's lists may be nested as deep as a message can hold
        return False


def _params_of(parameters: Any) -> Any:
    extra = getattr(parameters, "extra_args", None)
    return extra.get("kv_transfer_params") if isinstance(extra, dict) else None
