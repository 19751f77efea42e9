"""Attention that cannot be context parallel is refused by the names of its backends and layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.context_parallel import (
    AttentionRefused,
    check_attention_cp_compatibility,
)
from kvferry.protocol.errors import KvferryError


class LatentBackend:
    @staticmethod
    def get_name() -> str:
        return "LATENT"

    @classmethod
    def supports_pcp(cls) -> bool:
        return True


class DenseBackend(LatentBackend):
    @staticmethod
    def get_name() -> str:
        return "DENSE"

    @classmethod
    def supports_pcp(cls) -> bool:
        return False


class StateBackend(LatentBackend):
    """The backend of a recurrent state: it has no implementation, and some have no name either."""

    @staticmethod
    def get_name() -> str:
        raise NotImplementedError

    @classmethod
    def supports_pcp(cls) -> bool:
        raise NotImplementedError


def check_layers(
    layers: Mapping[str, object],
    *,
    pcp: int = 1,
    dcp: int = 1,
    interleave: int = 1,
    speculative: bool = False,
    pcp_layers: set[str] | None = None,
) -> None:
    """The check of these layers."""
    parallel = SimpleNamespace(
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
    )
    config: Any = SimpleNamespace(
        parallel_config=parallel, speculative_config=object() if speculative else None
    )
    with mock.patch(
        "kvferry.connector.context_parallel.get_layers_from_vllm_config",
        return_value=layers,
    ):
        check_attention_cp_compatibility(config, pcp_layers)


def layer(backend: object = LatentBackend, **impl: Any) -> SimpleNamespace:
    said = {"need_to_return_lse_for_decode": True, "dcp_world_size": 2, **impl}
    return SimpleNamespace(
        get_attn_backend=lambda: backend, impl=SimpleNamespace(**said)
    )


def reasons(layers: Mapping[str, object], **sizes: Any) -> list[str]:
    with pytest.raises(AttentionRefused) as caught:
        check_layers(layers, **sizes)
    assert isinstance(caught.value, KvferryError)
    found = [str(reason) for reason in caught.value.reasons]
    assert all(reason in str(caught.value) for reason in found)
    return found


def test_all_reasons_are_given_at_once() -> None:
    layers = {
        "a": layer(DenseBackend),
        "b": layer(need_to_return_lse_for_decode=False),
        "c": layer(StateBackend),
    }
    found = reasons(layers, pcp=2, dcp=2)
    assert found == [
        "DENSE of a cannot do prefill context parallelism (supports_pcp is False, not True)",
        "LATENT of b cannot do decode context parallelism (need_to_return_lse_for_decode is False, not True)",
        "StateBackend of c cannot do prefill context parallelism (it does not declare supports_pcp)",
    ]


def test_an_implementation_is_asked_where_the_backend_says_nothing() -> None:
    layers = {"a": SimpleNamespace(impl=SimpleNamespace(supports_pcp=True))}
    check_layers(layers, pcp=2)
    assert reasons({"a": SimpleNamespace(impl=SimpleNamespace())}, pcp=2) == [
        "SimpleNamespace of a cannot do prefill context parallelism (it does not declare supports_pcp)"
    ]


@pytest.mark.parametrize("answer", [1, "yes", None, 0])
def test_only_a_yes_is_a_yes(answer: object) -> None:
    layers = {"a": SimpleNamespace(impl=SimpleNamespace(supports_pcp=answer))}
    assert len(reasons(layers, pcp=2)) == 1


def test_what_has_no_attention_is_passed_over() -> None:
    check_layers(
        {"mlp": SimpleNamespace(), "none": SimpleNamespace(impl=None)}, pcp=2, dcp=2
    )


def test_a_drafter_that_every_rank_runs_whole_need_not_be_able() -> None:
    layers = {
        "model.0": layer(),
        "draft.0": layer(
            DenseBackend, dcp_world_size=1, need_to_return_lse_for_decode=False
        ),
    }
    check_layers(layers, pcp=2, dcp=2, pcp_layers={"model.0"})
    assert len(reasons(layers, pcp=2, dcp=2)) == 2


@pytest.mark.parametrize(("pcp", "dcp"), [(1, 2), (2, 1), (2, 2)])
def test_drafts_under_an_interleave_of_several_tokens_need_a_backend_that_can(
    pcp: int, dcp: int
) -> None:
    layers = {"a": layer()}
    check_layers(layers, pcp=pcp, dcp=dcp, interleave=16)
    check_layers(layers, pcp=pcp, dcp=dcp, speculative=True)
    assert reasons(layers, pcp=pcp, dcp=dcp, interleave=16, speculative=True) == [
        "LATENT of a cannot check drafts under an interleave of several tokens "
        "(it does not declare supports_mtp_with_cp_non_trivial_interleave_size)"
    ]
