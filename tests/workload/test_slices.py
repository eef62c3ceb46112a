"""The loss in slices: the same mean and gradients as of the whole batch, with the memory of one slice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.workload import SLICE_TOKENS, sliced


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean over samples, by one call."""
    return model(batch).square().mean()


def grads(loss: Tensor, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("num_samples", "tokens"), [(5, 1024), (8, 2048), (6, 700), (3, 5000)])
def test_slices_are_the_whole(num_samples: int, tokens: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    batch = torch.randn(num_samples, 4, dtype=torch.double)
    loss = sliced(mean_loss, num_samples, tokens)
    assert loss is not mean_loss
    whole = mean_loss(model, batch)
    assert loss(model, batch).item() == pytest.approx(whole.item(), rel=1e-12)
    for part, expected in zip(grads(loss(model, batch), model), grads(whole, model), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-11, atol=1e-14)


def test_what_fits_into_a_slice_is_left_as_it_is() -> None:
    assert sliced(mean_loss, 32, SLICE_TOKENS // 32) is mean_loss
    assert sliced(mean_loss, 1, 10 * SLICE_TOKENS) is mean_loss


def test_only_one_slice_is_kept_for_the_backward() -> None:
    model = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    batch = torch.randn(8, 4)

    def saved(loss: object) -> int:
        sizes: list[int] = []
        pack = lambda tensor: (sizes.append(tensor.nbytes), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss(model, batch)  # type: ignore[operator]
        return sum(sizes)

    assert saved(sliced(mean_loss, 8, SLICE_TOKENS)) < saved(mean_loss) / 4
