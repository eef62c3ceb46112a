"""FSDP2 (``torch.distributed.fsdp.fully_shard``): each block is a unit, all else is the root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bench.backends.base import BF16_PARAMETERS, Backend, BackendFamily, Offloading
from bench.backends.training_job import Job
from bench.plan.categories import Category
from bench.plan.cell import SHARDED_REFERENCE, Sharding, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import DTensor


def mixed_precision(*, bf16: bool) -> MixedPrecisionPolicy:
    """With ``bf16``, parameters are gathered and gradients computed in bf16.

    They are reduced and accumulated in fp32, so eager and deferred sync accumulate in the same
    dtype.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if bf16:
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return MixedPrecisionPolicy()


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    bf16: bool,
    reshard_after_forward: bool,
    offload_policy: OffloadPolicy | None = None,
) -> FSDPModule:
    """``fully_shard`` each block, then the root, in place.

    The root is never resharded after forward (the default).
    """
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    of_root = None
    if not reshard_after_forward:
        of_root = False
    if offload_policy is None:
        offload_policy = OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(bf16=bf16),
        "offload_policy": offload_policy,
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **common)
    fully_shard(model, reshard_after_forward=of_root, **common)
    return cast("FSDPModule", model)


class Gathered(Mapping[str, "Tensor"]):
    """The full parameters of a sharded model, on the CPU.

    Each is gathered on access, which is collective.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        parameter = self._parameters[name].detach()
        if not isinstance(parameter, DTensor):
            return parameter.cpu()
        sharded: DTensor = parameter
        if "gloo" in dist.get_backend_config():
            # Its all-gather of DTensors on CUDA reads device memory on the host:
            # pytorch/pytorch#132471.
            sharded = cast("DTensor", sharded.cpu())
        whole: Tensor = sharded.full_tensor()
        return whole.cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def holdings(model: nn.Module) -> dict[Category, list[Tensor]]:
    """The shard, gathered copy and unsharded gradient of every ``FSDPParam`` of a sharded model.

    The gradient is in ``grad`` of the gathered copy or, if it is summed in another dtype, in
    ``unsharded_accumulated_grad``. Where only the all-reduce of HSDP is deferred, a unit keeps the
    sum of its reduce-scatters in ``_partial_reduce_output``
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """
    from torch.distributed.fsdp import FSDPModule

    found: dict[Category, list[Tensor]] = {
        Category.PARAMETERS_SHARDED: [],
        Category.PARAMETERS_UNSHARDED: [],
        Category.GRADIENTS_UNSHARDED: [],
        Category.GRADIENTS_SHARDED: [],
    }
    groups: list[FSDPParamGroup] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups += _groups(module._get_fsdp_state())
    for group in groups:
        partial = getattr(group, "_partial_reduce_output", None)
        if partial is not None:
            found[Category.GRADIENTS_SHARDED].append(partial)
        for parameter in group.fsdp_params:
            found[Category.PARAMETERS_SHARDED].append(parameter._sharded_param_data)
            gathered = getattr(parameter, "_unsharded_param", None)  # made by the first gather
            found[Category.PARAMETERS_UNSHARDED] += parameter.all_gather_outputs
            if parameter.unsharded_accumulated_grad is not None:
                found[Category.GRADIENTS_UNSHARDED].append(parameter.unsharded_accumulated_grad)
            if gathered is not None and gathered.grad is not None:
                found[Category.GRADIENTS_UNSHARDED].append(gathered.grad)
    return found


def _groups(state: FSDPState) -> Sequence[FSDPParamGroup]:
    """The parameter groups of a unit; versions of torch differ in the attribute."""
    groups: Sequence[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


class FSDP2Backend(Backend):
    """What all backends over FSDP2 have in common, whoever owns the loop."""

    sharding = Sharding.PARAMS
    bf16_as = BF16_PARAMETERS
    splits_root: ClassVar[bool] = False
    """Whether the embedding, and norm and head together, are units of their own, and not in the
    root."""
    always_computes_norm: ClassVar[bool] = False
    """Whether the norm of the gradient is computed without clipping too."""
    model: Any
    """The sharded model, with the names of the built one."""

    def full_parameters(self) -> Mapping[str, Tensor]:
        return Gathered(self.model)

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return holdings(self.model)

    def settings(self) -> dict[str, object]:
        return super().settings() | {"reshard_after_forward": True, "reduce_dtype": "fp32"}


class FSDP2Eager(FSDP2Backend):
    """Parameters are resharded after forward, and every backward reduce-scatters gradients."""

    name, framework = "fsdp2-eager", "FSDP2"
    family, colour = BackendFamily.PYTORCH, "#D55E00"
    sync = Sync.EAGER
    is_mechanism = True
    stepping = Stepping.WINDOW

    def train(self, job: Job) -> None:
        mesh, model = self.mesh(job), job.build()
        reshard_after_forward = self.sharding is Sharding.PARAMS
        self.model = shard(
            model,
            job.blocks(model),
            mesh,
            bf16=job.bf16,
            reshard_after_forward=reshard_after_forward,
            offload_policy=self.offload_policy(job),
        )
        self.optimizer = job.optimizer(model.parameters())
        self.continue_training(job)

    def mesh(self, job: Job) -> DeviceMesh:
        """The ranks over which ``fully_shard`` shards."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(job.device.type, (job.world_size,))

    def offload_policy(self, job: Job) -> OffloadPolicy | None:
        """Where shards, their gradients and the optimizer rest; None for the device."""
        return None

    def continue_training(self, job: Job) -> None:
        self.optimizer.zero_grad()
        for window in job.each_window():
            for batch, last in window:
                if self.sync is Sync.DEFERRED_ALL_REDUCE:
                    self.model.set_requires_all_reduce(last)
                if self.sync is Sync.DEFERRED:
                    self.model.set_requires_gradient_sync(last)
                    # Not needed for correctness: skips the end-of-backward bookkeeping of all but
                    # the last.
                    self.model.set_is_last_backward(last)
                if self.sharding is Sharding.OPTIMIZER:
                    self.model.set_reshard_after_backward(last)
                loss = job.loss(self.model, batch)
                (loss / window.size).backward()
            job.clip(self.model.parameters())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def settings(self) -> dict[str, object]:
        reshards = "always"
        if self.sharding is Sharding.OPTIMIZER:
            reshards = "last micro-batch only"
        return super().settings() | {
            "reshard_after_forward": self.sharding is Sharding.PARAMS,
            "reshard_after_backward": reshards,
        }


class FSDP2Deferred(FSDP2Eager):
    """``set_requires_gradient_sync``: unsharded gradients are summed locally.

    They are reduced once per window.
    """

    name = "fsdp2-deferred"
    sync = Sync.DEFERRED


class FSDP2Zero2Eager(FSDP2Eager):
    """``reshard_after_forward=False``: parameters stay gathered from forward to backward.

    So they do under ZeRO-2.
    """

    name = "fsdp2-zero2-eager"
    sharding = Sharding.GRADS


class FSDP2Zero2Deferred(FSDP2Zero2Eager):
    """``fsdp2-zero2-eager`` with the reduction deferred to the end of the window."""

    name = "fsdp2-zero2-deferred"
    sync = Sync.DEFERRED


class FSDP2DeferredResident(FSDP2Zero2Deferred):
    """With ``set_reshard_after_backward``: parameters stay gathered for the whole window.

    So they do under ZeRO-1.
    """

    name = "fsdp2-deferred-resident"
    sharding = Sharding.OPTIMIZER


class FSDP2OffloadEager(Offloading, FSDP2Eager):
    """With ``CPUOffloadPolicy``: shards, their gradients and the optimizer rest on the host.

    Shards are copied to the device for every gather, and reduced gradients to the host. Pinned
    memory is the default, but needs a device. Norms for clipping, and gathers for comparisons, are
    of tensors of the host, so NCCL needs gloo beside it (``bench.launch.rank``).
    """

    name, framework = "fsdp2-offload-eager", "FSDP2 offload"
    colour = "#DDAA33"

    def offload_policy(self, job: Job) -> OffloadPolicy:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return CPUOffloadPolicy(pin_memory=job.device.type != "cpu")

    def settings(self) -> dict[str, object]:
        return super().settings() | {"offload_policy": "CPUOffloadPolicy"}


class FSDP2OffloadDeferred(FSDP2OffloadEager):
    """``fsdp2-offload-eager`` with the reduction deferred: the device sums whole gradients."""

    name = "fsdp2-offload-deferred"
    sync = Sync.DEFERRED


class ShardedReference(FSDP2Deferred):
    """The reference for models that do not fit on one GPU.

    FSDP2 shards the state and averages gradients once. Its cell is fp32 with checkpointed blocks,
    and with the fewest micro-batches that fit (``Cell.reference``).
    """

    name = SHARDED_REFERENCE
    refuses = Refusals(virtual="it is a reference, which needs the values of all ranks")
