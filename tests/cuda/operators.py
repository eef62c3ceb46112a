"""``python -m tests.cuda.operators``: prints how far values over the stub are from the CPU's, by case, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal ones, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(
    device: str, dtype: torch.dtype, key_heads: int, *, is_causal: bool = True
) -> list[Tensor]:
    """Its result, and the gradients of query, key and value."""
    heads = enumerate((4, key_heads, key_heads))
    q, k, v = (
        numbers(2, num, 32, 64, seed=seed).to(device, dtype).requires_grad_() for seed, num in heads
    )
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=key_heads != 4
    )
    out.float().square().sum().backward()
    return [tensor for tensor in (out, q.grad, k.grad, v.grad) if tensor is not None]


def training(device: str, **options: bool) -> list[Tensor]:
    """The weights after three clipped updates by AdamW."""
    model = torch.nn.Linear(64, 64, device=device)
    with torch.no_grad():
        model.weight.copy_(numbers(64, 64)), model.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        functional.cross_entropy(
            model(numbers(32, 64).to(device)), torch.arange(32, device=device)
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def embedding(device: str) -> list[Tensor]:
    """The gradient of a table of which rows are used twice."""
    table = numbers(64, 8).to(device).requires_grad_()
    functional.embedding(torch.arange(90, device=device) % 64, table).square().sum().backward()
    assert table.grad is not None
    return [table.grad]


def in_place(device: str) -> list[Tensor]:
    """Views, in-place operators, lists of tensors and an output that has to grow."""
    x, y = numbers(64, 64).to(device), numbers(64, 64, seed=1).to(device)
    x[:, ::2].add_(y.t()[:, ::2])
    torch._foreach_mul_([x, y], 2.0)
    out = torch.empty(0, device=device)
    torch.add(x, y, out=out)
    return [x, y, out, x[x > 0], torch.nonzero(y > 1), torch.unique((x * 3).int())]


def random_numbers(device: str) -> list[Tensor]:
    """Drawn twice from one state: differences, which are zero, and moments."""
    if device == "cpu":
        return [torch.zeros(3000), torch.tensor(True), torch.arange(50)]
    state = torch.cuda.get_rng_state()
    first, other = torch.randn(2, 3000, device=device)
    torch.cuda.set_rng_state(state)
    again = torch.randn(2, 3000, device=device)[0]
    is_normal = (
        (first.mean().abs() < 0.1) & ((first.std() - 1).abs() < 0.1) & (first != other).any()
    )
    return [first - again, is_normal, torch.randperm(50, device=device).sort().values]


CASES: dict[str, Callable[[str], Sequence[Tensor]]] = {
    "products": lambda device: [numbers(64, 32).to(device) @ numbers(32, 64, seed=1).to(device)],
    "products of bf16": lambda device: [
        numbers(64, 32).bfloat16().to(device) @ numbers(32, 64).bfloat16().to(device)
    ],
    "softmax of bf16 in fp32": lambda device: [
        torch.log_softmax(numbers(64, 64).bfloat16().to(device), -1, dtype=torch.float32)
    ],
    "attention": lambda device: attention(device, torch.float32, 4),
    "attention to all": lambda device: attention(device, torch.float32, 4, is_causal=False),
    "grouped attention": lambda device: attention(device, torch.float32, 2),
    "attention in bf16": lambda device: attention(device, torch.bfloat16, 4),
    "grouped attention in bf16": lambda device: attention(device, torch.bfloat16, 2),
    "foreach": lambda device: training(device, foreach=True),
    "fused": lambda device: training(device, fused=True),
    "embedding": embedding,
    "in place": in_place,
    "random numbers": random_numbers,
}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected; infinite where shapes or dtypes differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    difference = (found.detach().cpu().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm().clamp(min=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                name: max(map(error, compute("cuda"), compute("cpu")))
                for name, compute in CASES.items()
            }
        )
    )
