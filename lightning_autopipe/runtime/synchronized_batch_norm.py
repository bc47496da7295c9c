"""`nn.SyncBatchNorm` in a pipeline: each micro-batch is normalized by its statistics over the replicas of a stage.

Torch's own forward waits for all processes, which are at other places of the step, and refuses tensors on CPUs. In a
run it is replaced (`SynchronizedForward`) by one that is plain batch normalization, except in the layers of a training
step that really runs: there a `BatchNormSynchronizer` gives each layer a way to exchange its moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from lightning_autopipe.core.errors import PipelineRuntimeError, PlanError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.runtime.batch_norm_moments import combined, gathered_over_replicas, moments_of

Exchange = Callable[[str, Tensor], list[Tensor]]
"""Gives float64[n, num_features] of all replicas, of a forward, its recomputation, or a backward."""

_ATTRIBUTE = "_autopipe_exchange"
_KINDS = ("forward", "recomputation", "backward")
_MOST_ROWS = 3
_PLACE = 4
"""Numbers at the head of each message: kind, layer, the micro-batch that was begun last, and how many there are."""


def synchronized_layers(module: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """Give the layers of a module that take their statistics over replicas, in training mode or not, by path."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)}


def first_in_training(module: nn.Module) -> str | None:
    """Give the path of the first of them that is in training mode; None: there is none."""
    return next((path for path, layer in synchronized_layers(module).items() if layer.training), None)


def refuse_unlike_replicas(plan: PipelinePlan, module: nn.Module) -> None:
    """Raise where replicas would come to a layer unlike often.

    Raises:
        PlanError: the plan gives them unlike numbers of micro-batches, and the module has synchronized layers.
    """
    path = first_in_training(module)
    if plan.has_unlike_replicas and path is not None:
        raise PlanError(
            f"The plan gives its replicas {plan.replica_microbatches} micro-batches, but {path} is a SyncBatchNorm, "
            "which normalizes micro-batch i of all replicas together. Plan with equal numbers (num_microbatches=), or "
            "use BatchNorm."
        )


class BatchNormSynchronizer:
    """Lets the layers of a stage exchange moments with those of its other replicas, while training steps run.

    All replicas run the same actions in one order, so their exchanges pair up. Each message tells its place, and all
    are equally long, so that replicas at different places find out and stop.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Synchronize the layers of a module.

        Args:
            module: The module.
            group: The replicas of this stage; for nothing else.
        """
        self._module = module
        self._group = group
        self._num_microbatches = 0
        self._microbatch_index: Callable[[], int] = int
        self._is_silent: Callable[[], bool] = bool
        self._paths: list[str] = []
        self._num_features = 0

    @contextlib.contextmanager
    def training_step(
        self,
        owners: Mapping[str, frozenset[int]],
        stages: Collection[int],
        *,
        num_microbatches: int,
        microbatch_index: Callable[[], int],
        is_silent: Callable[[], bool],
    ) -> Iterator[None]:
        """Run the forwards and backwards of one step in this context. Collective over the replicas.

        Args:
            owners: For each parameter and written buffer the stages that use it.
            stages: Those that run in this process.
            num_microbatches: Of this replica.
            microbatch_index: Gives the one that was begun last.
            is_silent: Whether a trace runs.
        """
        layers = synchronized_layers(self._module)
        self._paths = list(layers)
        self._num_microbatches, self._microbatch_index, self._is_silent = num_microbatches, microbatch_index, is_silent
        own = [layer for path, layer in layers.items() if _may_run(path, layer, owners, stages)]
        self._num_features = max((layer.num_features for layer in own), default=0)
        try:
            for number, layer in enumerate(layers.values()):
                layer.__dict__[_ATTRIBUTE] = self._exchange_of(number)
            yield
        finally:
            for layer in layers.values():
                layer.__dict__.pop(_ATTRIBUTE, None)

    def _exchange_of(self, number: int) -> Callable[[], Exchange | None]:
        def exchange(kind: str, values: Tensor) -> list[Tensor]:
            place = [_KINDS.index(kind), number, self._microbatch_index(), self._num_microbatches]
            message = values.new_zeros(_PLACE + _MOST_ROWS * self._num_features)
            end = _PLACE + values.numel()
            message[:_PLACE] = values.new_tensor(place)
            message[_PLACE:end] = values.flatten()
            messages = gathered_over_replicas(message, self._group)
            self._require_one_place(torch.stack(messages)[:, :_PLACE])
            return [received[_PLACE:end].view_as(values) for received in messages]

        return lambda: None if self._is_silent() else exchange

    def _require_one_place(self, places: Tensor) -> None:
        if bool((places == places[0]).all()):
            return
        told = ", ".join(
            f"global rank {global_rank} in a {_KINDS[kind]} of {self._paths[number]} (last begun: micro-batch "
            f"{microbatch_index} of {num_microbatches})"
            for global_rank, (kind, number, microbatch_index, num_microbatches) in zip(
                dist.get_process_group_ranks(self._group), places.long().tolist(), strict=True
            )
        )
        raise PipelineRuntimeError(
            f"SyncBatchNorm normalizes a micro-batch of all replicas together, but they are at different places of the "
            f"step: {told}. Give all replicas batches of one size (drop_last=True), and let each step use the same "
            "layers in one order; or use BatchNorm"
        )


def _may_run(path: str, layer: nn.SyncBatchNorm, owners: Mapping[str, frozenset[int]], stages: Collection[int]) -> bool:
    """Whether a layer runs in this process, as far as its parameters and buffers tell."""
    names = [f"{path}.{name}".lstrip(".") for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    known = [owners[name] for name in names if name in owners]
    return not known or any(not stages_of.isdisjoint(stages) for stages_of in known)


class SynchronizedForward:
    """Between `install` and `remove` the forward of `nn.SyncBatchNorm` can be traced, cut, and run on any device."""

    def __init__(self) -> None:
        self._before: Any = None

    def install(self) -> None:
        """Makes the change."""
        self._before = nn.SyncBatchNorm.forward
        nn.SyncBatchNorm.forward = _forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Undoes it."""
        nn.SyncBatchNorm.forward = self._before  # type: ignore[method-assign]


def _forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Do what the forward of any batch normalization does, with `synchronized_batch_norm` as its last operation."""
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    momentum = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
    keeps_statistics = not self.training or self.track_running_stats
    get_exchange = self.__dict__.get(_ATTRIBUTE) if self.training else None
    return synchronized_batch_norm(
        input,
        self.running_mean if keeps_statistics else None,
        self.running_var if keeps_statistics else None,
        self.weight,
        self.bias,
        self.training or (self.running_mean is None and self.running_var is None),
        momentum,
        self.eps,
        None if get_exchange is None else get_exchange(),
    )


def synchronized_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    exchange: Exchange | None,
) -> Tensor:
    """Normalize as `F.batch_norm` does, over the inputs of all replicas where there is an exchange.

    One operation to whoever watches torch functions. `input` is [num_samples, num_features, ...], and so is the result.
    Collective over the replicas, and its backward as well.
    """
    tensors = (input, running_mean, running_var, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(synchronized_batch_norm, tensors, *tensors, training, momentum, eps, exchange)
    if exchange is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    is_again = torch._C._current_graph_task_id() != -1  # a backward is running
    moments = combined(exchange("recomputation" if is_again else "forward", moments_of(input)))
    if running_mean is not None and running_var is not None:
        count, mean, squares = moments
        with torch.no_grad():
            running_mean.copy_((1 - momentum) * running_mean.double() + momentum * mean)
            running_var.copy_((1 - momentum) * running_var.double() + momentum * squares / (count - 1))
    normalize: Any = _Normalization.apply
    return normalize(input, weight, bias, moments, eps, exchange)  # type: ignore[no-any-return]


class _Normalization(torch.autograd.Function):
    """Normalizes by moments of all replicas, which its backward goes through: a loss of any of them depends on all."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Tensor,
        eps: float,
        exchange: Exchange,
    ) -> Tensor:
        values = _precise(input)
        count, mean, squares = moments
        ctx.save_for_backward(input, weight, moments)
        ctx.eps, ctx.exchange = eps, exchange
        mean, variance = mean.to(values.dtype), (squares / count).to(values.dtype)
        weight, bias = (None if parameter is None else parameter.to(values.dtype) for parameter in (weight, bias))
        return F.batch_norm(values, mean, variance, weight, bias, training=False, eps=eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, moments = ctx.saved_tensors
        values, gradient = _precise(input), _precise(output_gradient)
        count, mean, squares = moments
        dims = [dim for dim in range(values.dim()) if dim != 1]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        scale = (squares / count + ctx.eps).rsqrt().to(values.dtype)
        normalized = (values - mean.to(values.dtype).view(shape)) * scale.view(shape)
        sums = torch.stack([gradient.sum(dims), (gradient * normalized).sum(dims)])
        input_gradient: Tensor | None = None
        if ctx.needs_input_grad[0]:
            over_replicas = torch.stack(ctx.exchange("backward", sums.double())).sum(0) / count
            through_mean, through_variance = over_replicas.to(values.dtype)
            if weight is not None:
                scale = scale * weight.to(values.dtype)
            input_gradient = gradient - through_mean.view(shape) - normalized * through_variance.view(shape)
            input_gradient = (input_gradient * scale.view(shape)).to(input.dtype)
        of_bias, of_weight = sums  # of this replica: the gradients of parameters are summed with all others
        return (
            input_gradient,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _precise(tensor: Tensor) -> Tensor:
    """The same values in a dtype whose sums are precise enough."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
