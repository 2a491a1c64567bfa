"""Same input, same bits, for any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moe_graph import ops
from tests.ops.comparing import assert_same_bits, routing
from tests.ops.routing_map_inputs import map_of

TOKENS, TOP_K, EXPERTS, HIDDEN = 301, 3, 5, 333
COPIES = TOKENS * TOP_K
_ops = torch.ops.moe_graph


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _row_idx() -> torch.Tensor:
    return torch.randperm(COPIES).to(torch.int32)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "init_routing": lambda: _bind(
        _ops.moe_init_routing_v2,
        _randn(TOKENS, HIDDEN),
        routing(TOKENS, TOP_K, EXPERTS, 0),
    ),
    "init_routing_grad": lambda: _bind(
        _ops.moe_init_routing_v2_grad, _randn(COPIES, HIDDEN), _row_idx(), TOP_K
    ),
    "finalize_routing": lambda: _bind(
        ops.moe_finalize_routing,
        _randn(COPIES, HIDDEN),
        _row_idx(),
        scales=_randn(TOKENS, TOP_K),
        drop_pad_mode=2,
    ),
    "finalize_routing_grad": lambda: _bind(
        _ops.moe_finalize_routing_v2_grad,
        _randn(TOKENS, HIDDEN),
        _row_idx(),
        _randn(COPIES, HIDDEN),
        _randn(TOKENS, TOP_K),
    ),
    "token_permute": lambda: _bind(
        ops.moe_token_permute, _randn(TOKENS, HIDDEN), routing(TOKENS, TOP_K, EXPERTS, 0), -7
    ),
    "token_permute_grad": lambda: _bind(
        ops.moe_token_permute_grad, _randn(COPIES, HIDDEN), _row_idx(), TOP_K
    ),
    "token_unpermute": lambda: _bind(
        ops.moe_token_unpermute, _randn(COPIES - 7, HIDDEN), _row_idx(), _randn(TOKENS, TOP_K)
    ),
    "token_unpermute_grad": lambda: _bind(
        ops.moe_token_unpermute_grad,
        _randn(COPIES - 7, HIDDEN),
        _randn(TOKENS, HIDDEN),
        _row_idx(),
        _randn(TOKENS, TOP_K),
    ),
    "permute_with_routing_map": lambda: _bind(
        ops.moe_token_permute_with_routing_map,
        _randn(TOKENS, HIDDEN),
        map_of(TOKENS, EXPERTS, TOP_K, seed=0),
        probs=_randn(TOKENS, EXPERTS),
        num_out_tokens=COPIES,
    ),
    "permute_with_routing_map_grad": lambda: _bind(
        ops.moe_token_permute_with_routing_map_grad,
        _randn(COPIES, HIDDEN),
        _randn(COPIES),
        _row_idx(),
        map_of(TOKENS, EXPERTS, TOP_K, seed=0),
        EXPERTS,
        TOKENS,
    ),
    "unpermute_with_routing_map": lambda: _bind(
        ops.moe_token_unpermute_with_routing_map,
        _randn(EXPERTS * TOKENS, HIDDEN),
        torch.randint(0, TOKENS, (EXPERTS * TOKENS,), dtype=torch.int32),
        (TOKENS, HIDDEN),
        probs=_randn(TOKENS, EXPERTS),
        drop_and_pad=True,
    ),
    "unpermute_with_routing_map_grad": lambda: _bind(
        ops.moe_token_unpermute_with_routing_map_grad,
        _randn(TOKENS, HIDDEN),
        _row_idx(),
        _row_idx(),
        map_of(TOKENS, EXPERTS, TOP_K, seed=0),
        _randn(COPIES, HIDDEN),
        _randn(TOKENS, EXPERTS),
    ),
    "swi_glu": lambda: _bind(_ops.swi_glu, _randn(TOKENS, 2 * HIDDEN)),
    "swi_glu_wide": lambda: _bind(_ops.swi_glu, _randn(2, 200_002)),
    "swi_glu_grad": lambda: _bind(
        _ops.swi_glu_grad, _randn(TOKENS, HIDDEN), _randn(TOKENS, 2 * HIDDEN)
    ),
}


def _bind(op: Callable[..., object], *args: object, **kwargs: object) -> Callable[[], object]:
    return lambda: op(*args, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_threads_does_not_matter(name: str) -> None:
    run = CASES[name]()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs = run()
        results.append([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got, want)
