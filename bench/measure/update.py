"""Compares the update of one SGD window with the reference's, over all parameters as one vector."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def save(change: Mapping[str, Tensor], path: Path) -> None:
    """Write the reference's update atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    save_file(dict(change), draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())  # or a power failure could leave an empty file
    draft.replace(path)


def change_from(model: nn.Module, after: Mapping[str, Tensor], backend: str) -> dict[str, Tensor]:
    """What an update changed, on the CPU, by name of a parameter; ``model`` has the values before it.

    Raises RuntimeError if the names after it are not the model's.
    """
    before = {name: p.detach() for name, p in model.named_parameters()}
    change = {name: after[name].detach().float().cpu() - before[name].cpu() for name in after if name in before}
    if missing := before.keys() ^ after.keys():
        raise RuntimeError(f"full_parameters() of {backend} is not the model's: {sorted(missing)[:3]}")
    return change


def compare(change: Mapping[str, Tensor], reference: Path) -> dict[str, float]:
    """The deviation of an update from the reference's, which is in a file."""
    with safe_open(reference, framework="pt") as stored:
        return deviation(change, stored.get_tensor, reference.name)


def deviation(change: Mapping[str, Tensor], expected: Callable[[str], Tensor], source: str) -> dict[str, float]:
    """The deviation of an update from the one expected, over all parameters together, summed in fp64.

    ``error`` is the relative L2 error |u - r| / |r|; ``scale`` the least-squares factor <u, r> / <r, r>; ``residual``
    the relative error after dividing u by it. A wrong divisor shows as a scale other than 1 without residual; lost or
    repeated samples show as a residual. A non-finite update has infinite error. Raises RuntimeError if r is zero or not
    finite.
    """
    uu = ur = rr = dd = 0.0
    for name, value in change.items():
        u, r = value.double().flatten(), expected(name).double().flatten()
        uu, ur, rr, dd = uu + float(u @ u), ur + float(u @ r), rr + float(r @ r), dd + float((u - r) @ (u - r))
    if rr == 0.0 or not math.isfinite(rr):
        raise RuntimeError(f"the reference update in {source} has norm {math.sqrt(rr)}: nothing to compare with")
    if not math.isfinite(uu):
        return {"error": math.inf, "scale": math.nan, "residual": math.nan}
    scale = ur / rr
    residual = math.sqrt(max(0.0, uu / (scale * scale) - 2 * ur / scale + rr) / rr) if scale else 1.0
    return {"error": math.sqrt(dd / rr), "scale": scale, "residual": residual}
