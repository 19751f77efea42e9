"""vLLM's second model runner around a connector's worker side, without the model: replayed.

The runner itself (`v1/worker/gpu/model_runner.py`) needs a GPU. What stands between it and the connector is a small
wrapper of vLLM's own (`v1/worker/gpu/kv_connector.py`), which runs anywhere: it is driven here in the order in which
the runner calls it. In 0.33 the runner takes the results before the drafter runs and finalises the step afterwards;
0.32's wrapper cannot do that, so that order is spelt out for it in `step_0_33`.

`FirstRunner` is the order of the first model runner, which CPU engines use, by vLLM's own mixin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

Forward = Callable[[Any], None]
"""The replacement of the model: it is called between the wrapper's two parts, with the scheduler's output."""


def no_forward(output: Any) -> None:
    """A model that computes nothing."""


@contextmanager
def connected(connector: Any) -> Iterator[None]:
    """vLLM keeps a process's connector in a global; several engines in one process take turns."""
    before = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before


class FirstRunner:
    """The first model runner's order: every load starts after the forward pass."""

    def __init__(self, config: Any, connector: Any, caches: dict[str, Any]) -> None:
        self._config, self._connector = config, connector
        connector.register_kv_caches(caches)

    def step(self, output: Any, forward: Forward = no_forward) -> Any:
        with connected(self._connector):
            self._connector.handle_preemptions(output.kv_connector_metadata)
            if not output.total_num_scheduled_tokens:
                empty = KVConnectorModelRunnerMixin.kv_connector_no_forward(
                    output, self._config
                )
                return empty.kv_connector_output
            with (
                set_forward_context(None, self._config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                    output
                ) as report,
            ):
                forward(output)
            return report


class SecondRunner:
    """The second model runner's order: replayed."""

    def __init__(self, config: Any, connector: Any, caches: dict[str, Any]) -> None:
        self._config, self._connector = config, connector
        with connected(connector):
            self._wrapper = ActiveKVConnector(config, caches)
            self._wrapper.reset_capture_state()
            # Warming up and capturing graphs run the model without the connector.
            self._wrapper.set_disabled(True)
            self._wrapper.set_disabled(False)

    def step(self, output: Any, forward: Forward = no_forward) -> Any:
        """0.32: pre_forward, model, finish_forward, drafter, post_forward."""
        with connected(self._connector):
            if not output.total_num_scheduled_tokens:
                return self._wrapper.no_forward(output).kv_connector_output
            self._forward(output, forward)
            return self._wrapper.post_forward(output.finished_req_ids)

    def step_0_33(
        self, output: Any, forward: Forward = no_forward, drafter: Forward = no_forward
    ) -> Any:
        """0.33 with a drafter: results first, then the drafter, then wait_for_save and the end of the metadata."""
        connector = self._connector
        with connected(connector):
            if not output.total_num_scheduled_tokens:
                return self._wrapper.no_forward(output).kv_connector_output
            self._forward(output, forward)
            if hasattr(self._wrapper, "finalize_step"):
                report = self._wrapper.post_forward(
                    output.finished_req_ids, defer_finalize=True
                )
                drafter(output)
                self._wrapper.finalize_step()
                return report
            # 0.32: the same calls of the connector.
            if self._wrapper._pending_load_kwargs is not None:
                self._wrapper._start_load_kv()
            results = connector.get_transfer_results(output.finished_req_ids)
            report = KVConnectorOutput(
                finished_sending=results.finished_sending or None,
                finished_recving=results.finished_recving or None,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_cache_events=connector.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            drafter(output)
            connector.wait_for_save()
            connector.clear_connector_metadata()
            return report

    def _forward(self, output: Any, forward: Forward) -> None:
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=list(range(len(names))), req_ids=names, num_tokens=len(names)
        )
        with set_forward_context(None, self._config):
            self._wrapper.pre_forward(output, batch)
            forward(output)
        self._wrapper.finish_forward()
