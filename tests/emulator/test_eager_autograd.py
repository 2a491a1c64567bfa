"""Losses, gradients and optimizers on the emulated device against the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_npu
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, ids, y: F.cross_entropy(x, ids),
    "nll": lambda x, ids, y: F.nll_loss(x.log_softmax(-1), ids),
    "mse": lambda x, ids, y: F.mse_loss(x, y),
    "l1": lambda x, ids, y: F.l1_loss(x, y),
    "l1 sum": lambda x, ids, y: F.l1_loss(x, y, reduction="sum"),
    "smooth_l1": lambda x, ids, y: F.smooth_l1_loss(x, y),
    "huber": lambda x, ids, y: F.huber_loss(x, y),
    "kl_div": lambda x, ids, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "kl_div mean": lambda x, ids, y: F.kl_div(x, y.softmax(-1)),
    "kl_div log": lambda x, ids, y: F.kl_div(x, y, log_target=True, reduction="sum"),
    "bce": lambda x, ids, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce weighted": lambda x, ids, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), weight=y.abs(), pos_weight=y[0].abs(), reduction="sum"
    ),
    "cosine": lambda x, ids, y: F.cosine_similarity(x, y).sum(),
    "amax": lambda x, ids, y: x.amax(),
    "batched matmul": lambda x, ids, y: (x[None].expand(2, 4, 5) @ y.t()[None]).square().sum(),
    "broadcast matmul": lambda x, ids, y: (x @ y.t().expand(3, 5, 4)).square().sum(),
    "folded matmul": lambda x, ids, y: (x[None] @ y.t()).square().sum(),
    "matrix vector": lambda x, ids, y: (x @ y[0]).square().sum(),
    "vector matrix": lambda x, ids, y: (x[0] @ y.t()).square().sum(),
    "vector vector": lambda x, ids, y: x[0] @ y[0],
    "clamp": lambda x, ids, y: x.clamp(-0.5, 0.5).sum(),
    "cumsum": lambda x, ids, y: (x.cumsum(-1) * y).sum(),
    "cdist": lambda x, ids, y: torch.cdist(x, y).sum(),
    "embedding": lambda x, ids, y: (F.embedding(ids % 4, x) * y).sum(),
    "gather": lambda x, ids, y: (x.gather(1, ids[:, None]) * y[:, :1]).sum(),
    "gelu": lambda x, ids, y: (F.gelu(x) * y).sum(),
    "index_add": lambda x, ids, y: (y.index_add(0, ids % 4, x) * y).sum(),
    "index_select": lambda x, ids, y: (x.index_select(0, ids % 4) * y).sum(),
    "layer_norm": lambda x, ids, y: (F.layer_norm(x, (5,)) * y).sum(),
    "linear": lambda x, ids, y: F.linear(x[None], y, y[:, 0]).square().sum(),
    "log_sigmoid": lambda x, ids, y: (F.logsigmoid(x) * y).sum(),
    "logsumexp": lambda x, ids, y: x.logsumexp(-1).sum(),
    "masked_fill": lambda x, ids, y: x.masked_fill(y > 0, 0.0).square().sum(),
    "max": lambda x, ids, y: (x.max(-1)[0] * y[:, 0]).sum(),
    "median": lambda x, ids, y: x.median(),
    "min keepdim": lambda x, ids, y: (x.min(0, keepdim=True)[0] * y).sum(),
    "norm": lambda x, ids, y: x.norm(),
    "normalize": lambda x, ids, y: (F.normalize(x) * y).sum(),
    "one_hot": lambda x, ids, y: (F.one_hot(ids, 5) * x).sum(),
    "prod": lambda x, ids, y: x.prod(),
    "repeat_interleave": lambda x, ids, y: x.repeat_interleave(2, 0).square().sum(),
    "repeat_interleave flat": lambda x, ids, y: x.repeat_interleave(2).square().sum(),
    "repeat_interleave tensor": lambda x, ids, y: x.repeat_interleave(ids, 0).square().sum(),
    "rms_norm": lambda x, ids, y: (F.rms_norm(x, (5,)) * y).sum(),
    "scatter_add": lambda x, ids, y: (y.scatter_add(1, ids[:, None].expand(4, 5), x) * y).sum(),
    "silu": lambda x, ids, y: (F.silu(x) * y).sum(),
    "softmax": lambda x, ids, y: (x.softmax(-1) * y).sum(),
    "sort": lambda x, ids, y: (x.sort(-1)[0] * y).sum(),
    "std": lambda x, ids, y: x.std(),
    "topk": lambda x, ids, y: x.topk(2)[0].square().sum(),
    "where": lambda x, ids, y: torch.where(y > 0, x, 0.0).square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient(name: str) -> None:
    x, y, ids = torch.randn(4, 5), torch.randn(4, 5), torch.randint(0, 5, (4,))
    on_cpu, on_npu = x.clone().requires_grad_(), x.npu().requires_grad_()
    want = LOSSES[name](on_cpu, ids, y)
    got = LOSSES[name](on_npu, ids.npu(), y.npu())
    torch.testing.assert_close(got.cpu(), want)
    want.backward()
    got.backward()
    assert on_cpu.grad is not None
    assert on_npu.grad is not None
    assert on_npu.grad.device.type == "npu"
    torch.testing.assert_close(on_npu.grad.cpu(), on_cpu.grad)


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((3,), (3, 4))],
)
def test_second_derivative_of_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    tensors = [torch.randn(left), torch.randn(right)]

    def second(device: str) -> tuple[torch.Tensor, ...]:
        a, b = (x.to(device).requires_grad_() for x in tensors)
        first = torch.autograd.grad((a @ b).pow(3).sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (a, b))

    for got, want in zip(second("npu"), second("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want)


def composed_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def composed_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


NPU_OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "swiglu": (torch_npu.npu_swiglu, composed_swiglu),
    "rms_norm": (
        lambda x, w: torch_npu.npu_rms_norm(x, w, 1e-5)[0],
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
    ),
    "add_rms_norm": (
        lambda x, y, w: torch_npu.npu_add_rms_norm(x, y, w, 1e-5)[0],
        lambda x, y, w: F.rms_norm(x + y, (8,), w, 1e-5),
    ),
    "rotary_mul": (torch_npu.npu_rotary_mul, composed_rotary),
    "linear": (torch_npu.npu_linear, F.linear),
    "gelu": (torch_npu.npu_gelu, F.gelu),
    "silu": (torch_npu.npu_silu, F.silu),
    "dtype_cast": (
        lambda x: torch_npu.npu_dtype_cast(x, torch.bfloat16).float().square(),
        lambda x: x.bfloat16().float().square(),
    ),
}
NPU_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(3, 8), (8,)],
    "add_rms_norm": [(3, 8), (3, 8), (8,)],
    "rotary_mul": [(2, 4, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)],
    "linear": [(3, 8), (5, 8)],
}
WITHOUT_GRADIENT = ("add_rms_norm",)


@pytest.mark.parametrize("name", NPU_OPERATORS)
def test_operator_of_torch_npu(name: str) -> None:
    on_device, composed = NPU_OPERATORS[name]
    inputs = [torch.randn(shape) for shape in NPU_SHAPES.get(name, [(3, 8)])]
    on_cpu = [x.clone().requires_grad_() for x in inputs]
    on_npu = [x.npu().requires_grad_() for x in inputs]
    want, got = composed(*on_cpu), on_device(*on_npu)
    torch.testing.assert_close(got.cpu(), want)
    if name in WITHOUT_GRADIENT:
        return
    weights = torch.randn(want.shape)
    (want * weights).sum().backward()
    (got * weights.npu()).sum().backward()
    for npu_x, cpu_x in zip(on_npu, on_cpu, strict=True):
        assert npu_x.grad is not None
        torch.testing.assert_close(npu_x.grad.cpu(), cpu_x.grad)


OPTIMIZERS: list[tuple[str, dict[str, bool]]] = [
    *((name, {}) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS", "Muon")),
    *((name, {"foreach": False}) for name in ("SGD", "AdamW")),
    *((name, {"fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_optimizer(name: str, options: dict[str, bool]) -> None:
    cpu = nn.Sequential(nn.Linear(4, 8, bias=False), nn.SiLU(), nn.Linear(8, 4, bias=False))
    npu = nn.Sequential(nn.Linear(4, 8, bias=False), nn.SiLU(), nn.Linear(8, 4, bias=False))
    npu.load_state_dict(cpu.state_dict())
    npu.to("npu")
    x = torch.randn(16, 4)

    def train(model: nn.Module, x: torch.Tensor) -> list[float]:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(5)]

    want, got = train(cpu, x), train(npu, x.npu())
    assert want[-1] < want[0]
    torch.testing.assert_close(got, want)
    for got_weight, want_weight in zip(npu.parameters(), cpu.parameters(), strict=True):
        torch.testing.assert_close(got_weight.cpu(), want_weight)


def test_autocast() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")
    assert product.dtype == torch.bfloat16


def test_gradient_clipping() -> None:
    model = nn.Linear(4, 4).npu()
    model(torch.ones(2, 4, device="npu")).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm.device.type == "npu"
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(after.cpu(), torch.tensor(0.5))
