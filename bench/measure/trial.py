"""The passes of one trial on one rank.

Instruments change what they measure, so each has its own pass, a method of RankTrial, on a fresh
build of the cell; only collectives are counted while memory is watched. Passes of one window take
it after SETTLED_WINDOWS. The operators of forward and backward are compared with those of the plain
model, which runs on fake tensors, once per run.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from bench.backends import blocks
from bench.backends.base import Backend, Offloading, only
from bench.backends.training_job import EndOfPassError, Job
from bench.errors import UnsupportedError
from bench.measure import apart, heartbeat
from bench.measure.accumulation_dtype import accumulator
from bench.measure.collectives import CollectiveCount, CollectiveCounter
from bench.measure.dispatch import HostCost
from bench.measure.exposure import WindowProfiler, exposure
from bench.measure.final_state import FinalState, write_truth
from bench.measure.host import HostLoad
from bench.measure.memory import MemoryProbe, cuda_peaks
from bench.measure.operators import plain_work
from bench.measure.projection import IN_FP32, PARAMETERS, UNCLIPPED, Part
from bench.measure.taps import EventKind, Instrument, SettledWindows, Taps, clock_for, updates
from bench.measure.tensors import tensors
from bench.measure.tracing import WindowTrace
from bench.measure.update import change_from, compare, device_check, save, sizes_of
from bench.plan.cell import REFERENCE, SGD, Cell, Precision, Status
from bench.plan.task import SETTLED_WINDOWS, Spec
from bench.workload import Batch, Loader, Loss, batches, load, sliced
from bench.workload.layout import overhang, record

COMPARED = {
    "error": "error",
    "scale": "scale",
    "residual": "residual",
    "tensor_error": "tensor_error",
    "tensor": "tensor",
}
"""What an update has of ``bench.measure.update.compare``, by its name there; this and two more
kinds of windows."""
BEFORE_CLIPPING = {"error": "unclipped_error", "scale": "unclipped_scale", "norm": "gradient_norm"}
FP32_COMPARED = {
    "error": "fp32_error",
    "tensor_error": "fp32_tensor_error",
    "tensor": "fp32_tensor",
}
MOST_FP32_FLOPS = 3e14
"""Model FLOPs that a GPU may spend on a cell's update in fp32: some 7 s on an H100."""
FP32_MEMORY = 2.2
"""What a window in fp32 may need of a GPU's memory, in peaks of one in bf16: activations have twice
the bytes."""

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOptions:
    """What a pass does otherwise than the trial: how ``RankTrial.train`` trains."""

    cell: Cell | None = None
    """None for the trial's."""
    optimizer: MakeOptimizer | None = None
    """None for the trial's."""
    clip_norm: float | None = None
    """None for that of the cell."""
    instrument: AbstractContextManager[object] | None = None
    """Is entered before the backend is made, and left after its training; no block is compiled
    under one, since Dynamo skips code under a dispatch mode."""
    keep_parameters: bool = False
    """Whether ``Backend.full_parameters`` is asked for afterwards."""
    watch: Callable[[Backend], None] | None = None
    """Is called with the backend before it builds."""
    built: Callable[[nn.Module], None] = lambda _: None
    """Is called with the model before the backend has it."""


AS_THE_TRIAL = PassOptions()
"""A pass that does nothing otherwise."""


def work(spec: Spec, rank: int, device: torch.device) -> dict[str, object]:
    """Run one rank's part of a trial in an initialized process group; see ``plan.task.Task``."""
    backend = only(spec.backend, spec.plugin)
    return RankTrial(spec, rank, device, backend, compares_apart=True).run()


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class RankTrial:
    """The passes of one trial on one rank, in an initialized process group."""

    def __init__(
        self,
        spec: Spec,
        rank: int,
        device: torch.device,
        backend: type[Backend],
        *,
        compares_apart: bool = False,
    ) -> None:
        """``compares_apart``: the launcher's process compares with the reference (``apart``)."""
        self.spec, self.cell, self.rank, self.device = spec, spec.cell, rank, device
        self.backend = backend
        self._compares_apart = compares_apart
        if reason := blocks.refusal(spec.cell, backend):
            raise UnsupportedError(reason)
        corpus = None
        if spec.corpus:
            corpus = Path(spec.corpus)
        self.workload = load(spec.cell, corpus)
        self._tensors = tensors(spec.cell, device)
        model = self._tensors.model(self.workload.model)
        self._unused_model: nn.Module | None = model
        self.num_parameters = _num_parameters(model)
        sizes = map(_num_parameters, self.workload.blocks(model))
        self.block_parameters = max(sizes, default=0)
        self._loss: Loss = self.workload.loss
        if self.cell.backend == REFERENCE:
            self._loss = sliced(
                self._loss, self.cell.global_batch_size, self.workload.tokens_per_sample
            )
        # Samples per update over the ranks that exist.
        self._batch_size = (
            self.cell.accumulate * self.cell.micro_batch_size * self.cell.num_processes
        )
        # Put the tokens of all windows on the device, so that no pass measures creating or copying
        # them.
        windows = max(self.cell.windows, SETTLED_WINDOWS + 1)
        self.data = self._tensors.data(self.workload.data, windows * self._batch_size)
        self.training_s = 0.0
        self._peak_bytes = 0
        self._update_parts: list[Part] = []
        self._memory: dict[str, int] | None = None
        self._settings: dict[str, object] = {}

    def run(self) -> dict[str, object]:
        """Run all passes; the result is plain JSON."""
        cell = self.cell
        result: dict[str, object] = {
            "status": Status.OK,
            "num_parameters": self.num_parameters,
            "entropy_floor": self.workload.entropy_floor,
            "tokens_per_step": self.workload.tokens_per_sample * cell.global_batch_size,
            "flops_per_step": None,
            "device_name": "cpu",
            "device_uuid": None,
        }
        if self.workload.flops_per_sample is not None:
            result["flops_per_step"] = self.workload.flops_per_sample * cell.global_batch_size
        if self.device.type != "cpu":
            gpu = torch.get_device_module(self.device).get_device_properties(self.device)
            result["device_name"] = gpu.name
            result["device_uuid"] = f"GPU-{gpu.uuid}"  # as NVML writes it
        if "dispatch" in self.spec.passes:
            kept_in = None
            if self.spec.reference:
                kept_in = Path(self.spec.reference).parent
            self._plain = plain_work(
                cell, self.workload, self._loss, self.data, kept_in, keep=self.rank == 0
            )
        for name in self.spec.passes:
            gc.collect()  # frees the previous pass: frameworks leave cycles
            heartbeat.beat()
            try:
                with self._tensors:
                    result[name] = getattr(self, name)()
            except Exception as error:
                error.add_note(f"in the {name} pass")
                raise
        if "time" not in result:  # which has them
            result["settings"] = self._settings
        result["training_s"] = self.training_s
        if self._update_parts:
            result["update_parts"] = [dataclasses.asdict(part) for part in self._update_parts]
        if "collectives" in result and self.cell.workload != "llama":
            result["layout"] = self._layout()
        return result

    def _layout(self) -> dict[str, object] | None:
        """The layout of a model that is not shipped, for the formulas.

        None where it cannot or need not be recorded.
        """
        if not self.cell.world.computes or self.rank != 0:
            return None
        loss = self.workload.loss
        first = batches.part(self.data, range(1))
        is_bf16 = self.cell.precision is Precision.BF16
        try:
            model = self.workload.model().to(self.device)
            layout = record(model, self.workload.blocks(model), loss, first)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
                size = range(self.cell.micro_batch_size)
                kept = overhang(model, loss, batches.part(self.data, size))
        except torch.OutOfMemoryError:  # as where only shards fit
            return None
        return dataclasses.replace(layout, gradient_overhang=kept).to_json()

    def train(
        self,
        taps: Taps,
        windows: int,
        how: PassOptions = AS_THE_TRIAL,
    ) -> Backend:
        """Build the backend, train it for some windows under the given taps, and return it."""
        cell, data = self.cell, self.data
        if how.cell is not None:
            cell = how.cell
        make_optimizer: MakeOptimizer = self._optimizer
        if how.optimizer is not None:
            make_optimizer = how.optimizer
        clip_norm = cell.clip_norm
        if how.clip_norm is not None:
            clip_norm = how.clip_norm
        instrument: AbstractContextManager[object] = nullcontext()
        compiled = cell.compiled
        if how.instrument is not None:
            instrument, compiled = how.instrument, False

        def fetch(samples: range) -> Batch:
            # Passes of more windows than the time pass see samples again.
            start = samples.start % batches.length(data)
            return batches.part(data, range(start, start + len(samples)))

        told = max(windows, cell.windows)  # the same in all passes, so that none can be told by it
        if told > windows:
            taps.ends_after = windows * cell.accumulate
        loader = Loader(
            fetch,
            windows=told,
            accumulate=cell.accumulate,
            world_size=cell.num_processes,
            rank=self.rank,
            global_batch_size=self._batch_size,
        )
        job = Job(
            cell=cell,
            rank=self.rank,
            world_size=cell.world_size,
            device=self.device,
            windows=told,
            accumulate=cell.accumulate,
            block_parameters=self.block_parameters,
            num_parameters=self.num_parameters,
            build=lambda: self._build(dataclasses.replace(cell, compiled=compiled), how.built),
            blocks=self.workload.blocks,
            loader=taps.loader(loader),
            loss=taps.loss(self._loss),
            optimizer=lambda parameters: taps.optimizer(make_optimizer(parameters)),
            keep_parameters=how.keep_parameters,
            clip_norm=clip_norm,
        )
        with instrument:
            backend = self.backend()  # what it holds from here on counts
            if how.watch is not None:
                how.watch(backend)
            with suppress(EndOfPassError):
                backend.train(job)
        if self.device.type == "cuda":
            torch.accelerator.synchronize()
            taps.finish()
        heartbeat.beat()
        self.training_s += taps.training_seconds
        return backend

    def _build(self, cell: Cell, built: Callable[[nn.Module], None]) -> nn.Module:
        """A new model with its blocks prepared.

        The first call uses the model whose parameters were counted.
        """
        model, self._unused_model = self._unused_model, None
        if model is None:
            model = self._tensors.model(self.workload.model)
        model = self._tensors.place(model)
        blocks.prepare(self.workload.blocks(model), cell)
        built(model)
        return model

    def _optimizer(self, parameters: Iterable[Parameter]) -> Optimizer:
        if self.cell.optimizer == SGD:
            return torch.optim.SGD(parameters, lr=self.cell.learning_rate, foreach=True)
        kind = self.cell.optimizer.removeprefix("adamw-")
        return torch.optim.AdamW(parameters, lr=self.cell.learning_rate, **{kind: True})  # type: ignore[arg-type]

    def time(self) -> dict[str, object]:
        """The time pass: step times, losses, and counts of steps and micro-batches.

        ``began`` and ``ended`` are the monotonic times at which the device reached the first and
        last timed update; ``host`` is the load by others.
        """
        clock = clock_for(self.device)
        cuda = self.device.type == "cuda"
        taps = Taps(clock.mark, num_due=self.cell.windows * self.cell.accumulate)
        load = HostLoad()
        warmup = self.cell.warmup_windows
        seen = 0

        def after_warmup(kind: EventKind) -> None:
            nonlocal seen
            seen += kind is EventKind.LOSS
            if kind is EventKind.STEP and seen == warmup * self.cell.accumulate:
                compiled_all()
                if cuda:
                    torch.accelerator.reset_peak_memory_stats()

        taps.on_event = None
        if cuda or self.cell.compiled:
            taps.on_event = after_warmup
        end = FinalState(Path(self.spec.reference))
        # What is gathered is gathered in one trial of a cell, as the update is.
        whole = "update" in self.spec.passes and self.cell.world.has_values
        with load, blocks.compiled_once(self.cell) as compiled_all:
            how = PassOptions(keep_parameters=whole, built=end.built)
            backend = self.train(taps, self.cell.windows, how)
        found = updates(taps.events)
        marks = [update.mark for update in found]
        reached, seconds = clock.moments(marks), clock.intervals(marks)
        losses = torch.empty(0, dtype=torch.double)
        if taps.losses and self.cell.world.has_values:
            losses = torch.stack(taps.losses).double().cpu()
        accumulate = self.cell.accumulate
        windows = len(losses) // accumulate
        began, ended = None, time.monotonic()
        if len(reached) >= warmup:
            began = reached[warmup - 1]
        if reached:
            ended = reached[-1]
        cuda_memory = None
        if cuda:
            cuda_memory = cuda_peaks()
            self._peak_bytes = cuda_memory["allocated"]
        return {
            "end": self._end(end, backend, taps.optimizers, whole=whole),
            "warmup_seconds": seconds[: warmup - 1],
            "step_seconds": seconds[warmup - 1 :],
            "began": began,
            "ended": ended,
            "host": load.result,
            "losses": losses[: windows * accumulate].view(windows, accumulate).mean(dim=1).tolist(),
            "span_s": taps.training_seconds,
            "marking_s": taps.marking_seconds,
            "num_micro_batches": len(taps.losses),
            "num_fetched": taps.count(EventKind.FETCH),
            "num_updates": len(found),
            "num_inner_steps": sum(update.num_inner_steps for update in found),
            "micro_batches_per_update": sorted({update.num_micro_batches for update in found}),
            "reported": backend.reported(),
            "settings": backend.settings(),
            "cuda_memory": cuda_memory,
        }

    def _end(
        self, end: FinalState, backend: Backend, optimizers: Sequence[Optimizer], *, whole: bool
    ) -> dict[str, object] | None:
        """What this rank holds after the last window of the time pass.

        The reference writes what is right. None in a world without values, or where nobody wants to
        know.
        """
        if not (self.cell.world.has_values and self.spec.reference):
            return None
        heartbeat.beat()
        if whole and self.cell.backend == REFERENCE and self.cell == self.cell.reference():
            before = self._tensors.model(self.workload.model)
            write_truth(
                Path(self.spec.reference), before, end.model, optimizers[0], self.cell.windows
            )
        settings = self._optimizer([Parameter(torch.zeros(1))]).defaults
        return end.read(backend, optimizers, settings, self.device, whole=whole)

    def update(self) -> dict[str, object] | None:
        """The update pass: one window of SGD with learning rate 1 from the initial weights.

        It clips as the cell clips. Rank 0's is compared with the reference's, other ranks only take
        part in gathering. A cell that clips has another such window without clipping, because
        clipping hides a wrong gradient scale if both gradients exceed the limit. Returns the
        results of ``compare`` (but what is compared apart) and, of references, ``device_check``,
        the gradient norm before clipping and, if the cell clips, error and scale without clipping
        as ``unclipped_*``.

        bf16 rounds away what happens to small tensors, so a cell in bf16 has another window in
        fp32, as ``fp32_*``, or why it has none.
        """
        reference = Path(self.spec.reference)
        cell, keys = self.cell, dict(COMPARED)
        found: dict[str, object] = {}
        if cell.clip_norm:
            before = reference.with_suffix(".unclipped")
            found |= self._sgd_window(0.0, before, UNCLIPPED, BEFORE_CLIPPING)
            gc.collect()
        else:
            keys["norm"] = "gradient_norm"
        found |= self._sgd_window(cell.clip_norm, reference, PARAMETERS, keys)
        if cell.precision is not Precision.FP32:
            gc.collect()
            found |= self._update_in_fp32(reference)
        if self.rank != 0:
            return None
        return found

    def _update_in_fp32(self, reference: Path) -> dict[str, object]:
        """The update of a cell in bf16, computed in fp32, or why it was not; all ranks agree."""
        if reason := self._no_fp32():
            return {"fp32_unchecked": reason}
        cell = dataclasses.replace(self.cell, precision=Precision.FP32, compiled=False)
        try:
            return self._sgd_window(cell.clip_norm, reference, IN_FP32, FP32_COMPARED, cell)
        except UnsupportedError as error:
            return {"fp32_unchecked": f"the backend refuses fp32: {error}"}

    def _no_fp32(self) -> str:
        """Why a window in fp32 cannot be afforded on a GPU; empty if it can. Collective."""
        if self.device.type == "cpu":
            return ""
        work = 6.0 * self.num_parameters * self.workload.tokens_per_sample
        if self.workload.flops_per_sample is not None:
            work = self.workload.flops_per_sample
        if work * self.cell.global_batch_size / self.cell.world_size > MOST_FP32_FLOPS:
            return f"a window in fp32 would take each GPU more than {MOST_FP32_FLOPS:.0e} FLOPs"
        available = torch.get_device_module(self.device).get_device_properties(self.device)
        memory = available.total_memory
        if self.cell.world.shares_gpus:
            memory //= self.cell.num_processes
        is_full = FP32_MEMORY * self._peak_bytes > memory
        full = torch.tensor(int(is_full), device=self.device)
        torch.distributed.all_reduce(full, op=torch.distributed.ReduceOp.MAX)
        if int(full):
            return "a window in fp32 might not fit into the memory of the GPU"
        return ""

    def _sgd_window(
        self,
        clip_norm: float,
        reference: Path,
        kind: str,
        keys: Mapping[str, str],
        cell: Cell | None = None,
    ) -> dict[str, object]:
        """One window of SGD with learning rate 1, compared with the reference's file.

        The reference writes that file. ``keys`` are those of ``compare`` with their names in the
        result. The parameters of all ranks are kept for the comparison with each other, as parts of
        a ``kind``. Empty on other ranks than 0.
        """
        taps = Taps(time.perf_counter)
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0, foreach=True)  # noqa: E731
        end = FinalState(reference)
        how = PassOptions(
            cell=cell, optimizer=sgd, clip_norm=clip_norm, keep_parameters=True, built=end.built
        )
        backend = self.train(taps, 1, how)
        after = end.projecting(backend.full_parameters(), kind, self.device)
        if self.rank != 0:
            for parameter in after:
                after[parameter]  # gathering is collective
            self._update_parts += after.parts
            return {}
        model = self._tensors.model(self.workload.model)  # drawn where it is compared
        change: Iterable[tuple[str, Tensor]] = change_from(model, after, self.cell.backend)
        is_reference = self.cell == self.cell.reference()
        is_apart = self._compares_apart and 4 * self.num_parameters <= apart.LARGEST_BYTES
        values, name = reference, kind.replace(" ", "-")
        if not is_reference:
            values = Path(self.spec.folder) / f"rank{self.rank}.{name}.safetensors"
        if is_reference or is_apart:
            kept = {parameter: value.cpu().contiguous() for parameter, value in change}
            sizes = sizes_of(model) if is_reference else {}
            save(kept, values, sizes, durable=is_reference)
            change = kept.items()
        checked: dict[str, object] = {}
        if is_reference:
            checked.update(device_check(self.cell, self.device, self._optimizer))
        if is_apart:
            self._update_parts += after.parts
            apart.ask(
                Path(self.spec.folder),
                self.rank,
                name,
                values=values,
                reference=reference,
                result="update",
                keys=keys,
            )
            return checked
        found: Mapping[str, object] = compare(change, reference, self.device)
        self._update_parts += after.parts
        return {named: found[key] for key, named in keys.items()} | checked

    def collectives(self) -> list[CollectiveCount]:
        """The collectives pass: those of one settled window, which may be the memory pass's."""
        counter = CollectiveCounter()
        counter.self_test(self.device)
        with counter:
            if "memory" in self.spec.passes:
                self._memory = self._watch_memory(counter)
            else:  # collectives do not depend on compilation
                self._settled(counter, how=PassOptions(instrument=nullcontext()))
        return counter.rows()

    def memory(self) -> dict[str, int]:
        """The memory pass: bytes by category of one settled window.

        The keys are those of ``bench.plan.categories.named``. ``peak`` and its parts belong to the
        moment of most live bytes; ``held`` and its parts to the second fetch, or where a loop
        fetches ahead to the moment before the second forward; they are absent if N = 1. Where a
        backend offloads from a device, the same of the host (ON_HOST), what of it is pinned, and
        what a window copies between both.
        """
        if not self._memory:
            return self._watch_memory()
        return self._memory

    def _watch_memory(self, *others: Instrument) -> dict[str, int]:
        """The memory of one settled window, which ``others`` measure too."""
        self._unused_model = None  # the ledger has to see each tensor of a model made
        given: dict[int, int] = {}
        for tensor in batches.tensors_of(self.data):
            storage = tensor.untyped_storage()
            given[storage._cdata] = storage.nbytes()
        probe = MemoryProbe(
            self.device.type,
            fake=not self.cell.world.computes,
            on_host=issubclass(self.backend, Offloading),
            given_bytes=sum(given.values()),
        )
        how = PassOptions(
            optimizer=lambda parameters: probe.optimizer(self._optimizer(parameters)),
            instrument=probe.active(),
            watch=probe.watch,
            built=probe.built,
        )
        backend = self._settled(probe, *others, observe=probe.on_event, how=how)
        self._settings = backend.settings()
        return probe.result

    def accumulation(self) -> dict[str, object]:
        """The accumulation pass: the dtype in which the backend sums gradients."""
        return accumulator(self.backend, self.cell, self.rank, self.device)

    def dispatch(self) -> dict[str, object]:
        """The dispatch pass: host cost of a window on this rank; see ``bench.measure.dispatch``."""
        taps = Taps(time.perf_counter)
        cost = HostCost(cuda=self.device.type == "cuda", taps=taps, plain=self._plain)
        windows = SettledWindows(self.cell.accumulate, *cost.instruments)
        taps.on_event = windows.on_event
        self.train(taps, windows.num_trained, PassOptions(instrument=closing(windows)))
        return cost.result

    def exposure(self) -> dict[str, float] | None:
        """The exposure pass: time in collectives in one settled window on this rank.

        With the exposed part. None if torch's profiler saw nothing on the device.
        """
        profiler = WindowProfiler()
        self._settled(profiler)
        return exposure(profiler.events)

    def trace(self) -> str:
        """The trace pass: the file in the task's folder with a Chrome trace of a settled window."""
        path = Path(self.spec.folder) / f"trace{self.rank}.json"
        tracer = WindowTrace(path, on_cuda=self.device.type == "cuda")
        how = PassOptions(
            optimizer=lambda parameters: tracer.optimizer(self._optimizer(parameters))
        )
        self._settled(tracer, observe=tracer.on_event, how=how)
        return path.name

    def _settled(
        self,
        *measuring: Instrument,
        observe: Callable[[EventKind], None] = lambda _: None,
        how: PassOptions = AS_THE_TRIAL,
    ) -> Backend:
        """Train to the end of the settled window, which ``measuring`` measure.

        ``observe`` gets every event.
        """
        taps = Taps(time.perf_counter)
        windows = [SettledWindows(self.cell.accumulate, instrument) for instrument in measuring]

        def on_event(kind: EventKind) -> None:
            taps.losses.clear()  # or their memory would be counted
            observe(kind)
            for window in windows:
                window.on_event(kind)

        taps.on_event = on_event
        # A loader that fetches ahead has one fetch less in the last window, and the memory pass
        # waits for the second.
        num_trained = windows[0].num_trained
        if self.cell.accumulate == 2:
            num_trained += 1
        return self.train(taps, num_trained, how)
