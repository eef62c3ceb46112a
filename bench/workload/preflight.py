"""A check of a workload of one's own before the first trial: once, in a process of its own.

``require`` starts it and needs no torch; the process runs ``examine``. What breaks a comparison is
named in one sentence there, and not after minutes as a defect of every backend.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import InputError
from bench.plan.cell import Cell, Device
from bench.plan.models import CONFIG_FILES, LLAMA

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from bench.workload import Batch, Workload

LIMIT_S = 600
"""Seconds after which the process is ended."""
SAMPLES = 4
"""Samples that are drawn."""
SAME_GRADIENT = 1e-2
"""Relative L2 difference of gradients that are the same; a thousand times what the gate on the
update allows, so that no model is refused that might pass it."""
SAME = 1e-4
"""Relative difference of losses that are the same: fp32 sums in another order differ by some
1e-6."""


class UnfitError(Exception):
    """What is wrong with a workload, in words that follow its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What is wrong with a workload, in words that follow its name; empty where nothing is."""

    wrong: str = ""
    """For every backend."""
    mixed: str = ""
    """Where trained parameters must have one dtype."""
    mixed_unit: str = ""
    """Where those of a block, or of all else, must."""
    on_copies: str = ""
    """Where bf16 is computed on bf16 copies of the parameters, without autocast."""
    on_copies_and_inputs: str = ""
    """Where the inputs of the model and of each block are cast too."""


def require(
    cells: Mapping[str, Cell], corpus: Path | None, *, shards: bool, in_bf16: bool
) -> dict[str, Examined]:
    """Check each workload of these cells, by name, that is not shipped.

    ``shards``: whether a backend of the run shards parameters by blocks; ``in_bf16``: whether a
    cell is in bf16. Returns what was found, by the same names. Raises InputError for the first one
    that no backend can train.
    """
    found: dict[str, Examined] = {}
    for name, cell in cells.items():
        if name == LLAMA or not cell.world.computes:
            continue
        found[name] = _ask(cell, corpus, shards=shards, in_bf16=in_bf16)
        if found[name].wrong:
            raise InputError(f"workload '{name}': {found[name].wrong}")
    return found


def _ask(cell: Cell, corpus: Path | None, *, shards: bool, in_bf16: bool) -> Examined:
    """What the process found."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        asked = {
            "cell": cell.to_dict(),
            "corpus": None if corpus is None else str(corpus),
            "config": str(CONFIG_FILES.get(cell.workload, "")),
            "shards": shards,
            "in_bf16": in_bf16,
            "answer": str(answer),
        }
        with log.open("wb") as output:
            command = [sys.executable, "-m", "bench.workload.preflight", json.dumps(asked)]
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=LIMIT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return Examined(
                    wrong=f"its check took longer than {LIMIT_S} s; it is a model, two samples and "
                    "five losses"
                )
        if answer.exists():
            return Examined(**json.loads(answer.read_text(encoding="utf-8")))
        last = "it wrote nothing"
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            last = lines[-1]
        return Examined(wrong=f"its process ended with status {status}: {last}")


def main(asked: str) -> None:
    """Examine the workload that ``require`` asks for, and write the answer."""
    given = json.loads(asked)
    cell = Cell.from_dict(given["cell"])
    corpus = None
    if given["corpus"] is not None:
        corpus = Path(given["corpus"])
    if given["config"]:
        CONFIG_FILES[cell.workload] = Path(given["config"])
    found = examine(cell, corpus, shards=given["shards"], in_bf16=given["in_bf16"])
    Path(given["answer"]).write_text(json.dumps(asdict(found)), encoding="utf-8")


def examine(cell: Cell, corpus: Path | None, *, shards: bool, in_bf16: bool = False) -> Examined:
    """What is wrong with the workload of a cell, and with ``in_bf16`` in bf16 too.

    Nothing is if the device has no memory for it.
    """
    import torch

    try:
        return _Examination(cell, corpus, shards=shards, in_bf16=in_bf16).run()
    except UnfitError as error:
        return Examined(wrong=str(error))
    except torch.OutOfMemoryError:
        return Examined()


@contextmanager
def _raising(what: str) -> Iterator[None]:
    """Tell which part of the workload raised."""
    import torch

    try:
        yield
    except (UnfitError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except InputError as error:
        raise UnfitError(str(error)) from error
    except BaseException as error:  # the user's code may also exit
        text = " ".join(str(error).split())
        raise UnfitError(f"{what} raises {type(error).__name__}: {text}") from error


class _Examination:
    def __init__(self, cell: Cell, corpus: Path | None, *, shards: bool, in_bf16: bool) -> None:
        """The cell with the smallest micro-batches of the run."""
        import torch

        from bench.workload import load

        self._shards, self._in_bf16 = shards, in_bf16
        self._micro_batch_size = cell.micro_batch_size
        self._device = torch.device("cpu")
        if cell.device is Device.CUDA and torch.cuda.is_available():
            self._device = torch.device("cuda")
        with _raising("its factory"):
            try:
                self._workload: Workload = load(cell, corpus)
            except InputError as error:  # which begins with its name
                raise UnfitError(str(error).removeprefix(f"{cell.workload}: ")) from error

    def run(self) -> Examined:
        import torch

        self._check_numbers()
        model = self._model()
        batch = self._samples()
        self._check_draws(model, batch)
        called = self._check_loss(model, batch)
        self._check_blocks(model, called)
        self._check_mean(model, batch)
        self._check_gradients(model, batch)
        blocks = list(self._workload.blocks(model))
        inside = {id(p) for block in blocks for p in block.parameters()}
        units = [block.parameters() for block in blocks]
        units.append(p for p in model.parameters() if id(p) not in inside)
        names = {id(p): name for name, p in model.named_parameters()}
        found = Examined(
            mixed=_mixed(model.parameters(), names),
            mixed_unit=next(filter(None, (_mixed(unit, names) for unit in units)), ""),
        )
        if not self._in_bf16:
            return found
        model.zero_grad()
        for p in model.parameters():  # nothing needs the fp32 ones any more
            if p.is_floating_point():
                p.data = p.data.to(torch.bfloat16)
        return replace(
            found,
            on_copies=self._raised_in_bf16(model, (), batch),
            on_copies_and_inputs=self._raised_in_bf16(model, [model, *blocks], batch),
        )

    def _raised_in_bf16(self, model: nn.Module, cast: Sequence[nn.Module], batch: Batch) -> str:
        """What a loss raises on bf16 parameters, with its module; empty if nothing.

        Inputs of the modules ``cast`` are cast too, as by ``MixedPrecisionPolicy.cast_forward_inputs``.
        """
        import torch
        from torch.utils._pytree import tree_map_only

        def cast_inputs(_: nn.Module, *inputs: object) -> Any:
            return tree_map_only(torch.Tensor, _to_bf16, inputs)

        running: list[str] = []
        handles: list[RemovableHandle] = []

        def left(*_: object) -> None:
            running.pop()

        for name, module in model.named_modules():
            entered = partial(lambda name, *_: running.append(name), name)
            handles += [
                module.register_forward_pre_hook(entered),
                module.register_forward_hook(left),
            ]
        for module in cast:
            handles.append(module.register_forward_pre_hook(cast_inputs, with_kwargs=True))
        try:
            self._workload.loss(model, batch)
        except torch.OutOfMemoryError:
            return ""
        except Exception as error:
            where = "loss()"
            if running:
                kind = type(model.get_submodule(running[-1])).__name__
                where = f"its module '{running[-1]}' ({kind})"
            text = " ".join(str(error).split())
            return f"{where} raises {type(error).__name__} with bf16 weights: {text}"
        finally:
            for handle in handles:
                handle.remove()
        return ""

    def _check_numbers(self) -> None:
        workload = self._workload
        for name in ("flops_per_sample", "entropy_floor"):
            if not hasattr(workload, name):
                raise UnfitError(f"it has no {name}; see 'A model of your own' in docs/matrix.md")
            value = getattr(workload, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise UnfitError(f"{name} is {value!r}; it must be a finite number, or None")

    def _model(self) -> nn.Module:
        import torch

        with _raising("model()"):
            model, other = self._workload.model(), self._workload.model()
        weights = dict(model.named_parameters())
        if not any(p.requires_grad for p in weights.values()):
            raise UnfitError("its model has no parameter that is trained")
        for name, p in weights.items():
            if p.requires_grad and p.is_floating_point() and p.dtype != torch.float32:
                dtype = str(p.dtype).removeprefix("torch.")
                raise UnfitError(
                    f"its parameter '{name}' is {dtype}; model() must return an fp32 model"
                )
        for name, p in other.named_parameters():
            if name not in weights or not torch.equal(p, weights[name]):
                raise UnfitError(
                    f"model() returns another '{name}' each time; seed its generator with spec.seed"
                )
        return model.to(self._device).train()

    def _samples(self) -> Batch:
        """The first samples, on the device."""
        import torch

        from bench.workload.batches import tensors_of, to

        with _raising("data()"):
            samples, fewer = self._workload.data(SAMPLES), self._workload.data(SAMPLES // 2)
        tensors, first = tensors_of(samples), tensors_of(fewer)
        if not tensors:
            kind = type(samples).__name__
            raise UnfitError(
                f"data() returns {kind} without a tensor; it must be a tensor, or a tuple or dict "
                "of them"
            )
        for found, count in ((tensors, SAMPLES), (first, SAMPLES // 2)):
            for tensor in found:
                if tensor.dim() == 0 or len(tensor) != count:
                    shape = list(tensor.shape)
                    raise UnfitError(
                        f"data({count}) has a tensor of shape {shape}; its first dimension must be "
                        f"{count}"
                    )
        for more, less in zip(tensors, first, strict=True):
            if not torch.equal(more[: len(less)], less):
                raise UnfitError(
                    f"data({SAMPLES}) and data({len(less)}) begin with other samples; sample i "
                    "must be fixed"
                )
        return to(samples, self._device)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        import torch

        with _raising("loss()"):
            loss: object = self._workload.loss(model, batch)
        found = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            if loss.shape == () and loss.requires_grad:
                return loss
            found = f"a tensor of shape {list(loss.shape)}"
            if not loss.requires_grad:
                found += " without a gradient"
        raise UnfitError(
            f"loss() returns {found}; it must be the mean loss, a scalar tensor from the model"
        )

    def _check_draws(self, model: nn.Module, batch: Batch) -> None:
        """Raise UnfitError if a forward in training mode draws random numbers.

        It names the innermost module that does.
        """
        drawing: list[str] = []
        states: dict[str, list[tuple[object, ...]]] = {}
        handles: list[RemovableHandle] = []

        def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
            def before(*_: object) -> None:
                states.setdefault(name, []).append(_random_state(self._device))

            def after(module: nn.Module, *_: object) -> None:
                if not _same(states[name].pop(), _random_state(self._device)):
                    drawing.append(f"its module '{name}' ({type(module).__name__})")

            return before, after

        for name, module in model.named_modules():
            before, after = hooks(name)
            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
        began = _random_state(self._device)
        self._loss(model, batch)
        ended = _random_state(self._device)
        for handle in handles:
            handle.remove()
        if not _same(began, ended):
            who = next(iter(drawing), "loss()")
            raise UnfitError(
                f"{who} draws random numbers in training mode, such as dropout: every backend "
                "would train on others; set its rate to 0"
            )

    def _check_loss(self, model: nn.Module, batch: Batch) -> set[int]:
        """The ids of called modules.

        Raises UnfitError for a loss that is not finite, or differs the second time.
        """
        called = Counter[int]()
        handles = [
            module.register_forward_hook(lambda module, *_: called.update([id(module)]))
            for module in model.modules()
        ]
        first = self._loss(model, batch).item()
        calls = called[id(model)]
        second = self._loss(model, batch).item()
        for handle in handles:
            handle.remove()
        if calls != 1:
            raise UnfitError(
                f"loss() calls the model {calls} times; a micro-batch must be one forward"
            )
        if not math.isfinite(first):
            raise UnfitError(
                f"the loss of the first {SAMPLES} samples is {first}; it must be finite"
            )
        if not math.isclose(first, second, rel_tol=SAME):
            raise UnfitError(
                f"the loss of the same samples is {first:.6g}, and {second:.6g} when it is "
                "computed again; it must be deterministic"
            )
        return set(called)

    def _check_blocks(self, model: nn.Module, called: set[int]) -> None:
        from torch import nn

        with _raising("blocks()"):
            blocks: list[object] = list(self._workload.blocks(model))
        inside = {id(module) for module in model.modules()}
        if len(set(map(id, blocks))) < len(blocks):
            raise UnfitError("blocks() names a module twice")
        for number, block in enumerate(blocks):
            if not isinstance(block, nn.Module) or id(block) not in inside:
                raise UnfitError(f"blocks()[{number}] is not a module of the model")
            if block is model:
                raise UnfitError(f"blocks()[{number}] is the model itself; name its layers")
            if id(block) not in called:
                raise UnfitError(
                    f"blocks()[{number}] ({type(block).__name__}) is never called in a forward"
                )
        if not blocks and self._shards:
            raise UnfitError(
                "blocks() is empty: there are none to shard; name the layers, or leave out such "
                "backends"
            )

    def _check_mean(self, model: nn.Module, batch: Batch) -> None:
        """Raise UnfitError unless the loss of two samples is the mean of theirs."""
        from bench.workload.batches import part

        first, second = (self._loss(model, part(batch, range(i, i + 1))).item() for i in range(2))
        both, mean = self._loss(model, part(batch, range(2))).item(), (first + second) / 2
        if not abs(both - mean) <= SAME * max(abs(first), abs(second), abs(both)):
            raise UnfitError(
                f"the loss of samples 0 and 1 is {both:.6g}, and the mean of their losses "
                f"{mean:.6g}: it is not a mean over samples (a sum, statistics of the batch, or "
                "samples of unequal weight), so it depends on N"
            )

    def _check_gradients(self, model: nn.Module, batch: Batch) -> None:
        self._backward(model, batch)
        depends = False
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if not p.grad.is_sparse and not bool(p.grad.isfinite().all()):
                raise UnfitError(f"the gradient of '{name}' is not finite")
            depends = depends or bool(p.grad.abs().sum() > 0)
        if not depends:
            raise UnfitError(
                "no parameter has a gradient other than 0: the loss does not depend on the model"
            )
        self._check_micro_batches(model, batch)

    def _check_micro_batches(self, model: nn.Module, batch: Batch) -> None:
        """Raise UnfitError unless the mean of micro-batches' gradients is that of all samples.

        They are summed outside of autograd, which may keep one tensor as the gradients of two
        parameters (pytorch issue 34082): that concerns only who sums in ``grad``. Micro-batches of
        the run with more than half of the samples count as ones of half of them.
        """
        from bench.workload.batches import part

        size = min(self._micro_batch_size, SAMPLES // 2)
        rest: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if p.grad is not None and not p.grad.is_sparse:
                rest[name] = p.grad.clone()
        whole = sum(float(gradient.norm()) ** 2 for gradient in rest.values())
        if whole == 0:
            return
        starts = range(0, SAMPLES, size)
        for start in starts:
            model.zero_grad()
            self._backward(model, part(batch, range(start, start + size)))
            for name, p in model.named_parameters():
                if name in rest and p.grad is not None:
                    rest[name] -= p.grad / len(starts)
        norms = {name: float(gradient.norm()) for name, gradient in rest.items()}
        off = math.sqrt(sum(norm**2 for norm in norms.values()) / whole)
        if off > SAME_GRADIENT:
            worst = max(norms, key=norms.__getitem__)
            raise UnfitError(
                f"the gradient of {SAMPLES} samples is not the mean of those of micro-batches of "
                f"{size}: off by {off:.2g}, most in '{worst}'. No framework is involved, so every "
                "backend would be found wrong: the backward of the model is wrong, or that of one "
                "of torch's operators; another size of micro-batches may be right"
            )

    def _backward(self, model: nn.Module, batch: Batch) -> None:
        with _raising("the backward of loss()"):
            self._loss(model, batch).backward()


def _to_bf16(tensor: Tensor) -> Tensor:
    import torch

    if tensor.is_floating_point():
        return tensor.to(torch.bfloat16)
    return tensor


def _mixed(parameters: Iterable[nn.Parameter], names: Mapping[int, str]) -> str:
    """The first of these parameters that is trained in another dtype than fp32 beside others.

    In words; empty if there is none.
    """
    trained = [p for p in parameters if p.requires_grad]
    if len({p.dtype for p in trained}) < 2:
        return ""
    other = next(p for p in trained if str(p.dtype) != "torch.float32")
    beside = next(p for p in trained if p.dtype != other.dtype)
    dtype, usual = (str(each.dtype).removeprefix("torch.") for each in (other, beside))
    return f"its parameter '{names[id(other)]}' is {dtype}, others beside it are {usual}"


def _random_state(device: torch.device) -> tuple[object, ...]:
    """The states of the generators that a forward may use: torch's, the device's, and Python's."""
    import torch

    states: list[object] = [torch.get_rng_state().clone(), random.getstate()]
    if device.type != "cpu":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


def _same(states: tuple[object, ...], others: tuple[object, ...]) -> bool:
    import torch

    for state, other in zip(states, others, strict=True):
        if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
            if not torch.equal(state, other):
                return False
        elif state != other:
            return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
