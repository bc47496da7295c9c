"""An optimizer of which each replica of a stage does a share: ZeRO-1, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_autopipe.runtime.gradient_buckets import plan_buckets
from lightning_autopipe.strategy.optimizers import WholeOptimizer

BUCKET_BYTES = 32 * 2**20
"""What parameters of one dtype are joined to, to be sent."""


class ShardedStep:
    """Lets an optimizer's step touch this replica's share of the parameters, so that it has state for no others.

    What the others have updated comes from them after the step. The parameter groups hold all parameters of the stage
    before and after the step, and in its closure: zeroing, clipping, schedulers and hooks see what they always see.

    It is there from the begin of a fit, since the first step's closure is what plans and places.

    Args:
        whole: The optimizer on this rank.
        group: The ranks of this stage.
        guard: A context for collectives.
    """

    def __init__(
        self, whole: WholeOptimizer, group: dist.ProcessGroup, guard: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._whole = whole
        self._optimizer = whole.optimizer
        self._group = group
        self._guard = guard
        self._module: nn.Module | None = None
        self._shares: Mapping[str, int] = {}
        self._by_replica: list[dict[str, nn.Parameter]] = []
        """Found out at the first step, since placing may give parameters new objects, and when groups are added."""
        self._dealt_names: tuple[str, ...] = ()
        self._source_ranks: tuple[int, ...] = ()
        self._replica_index = 0
        self._all: list[list[nn.Parameter]] | None = None
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    def share(
        self, module: nn.Module, shares: Mapping[str, int], *, source_ranks: tuple[int, ...], replica_index: int
    ) -> None:
        """Says who has what; the optimizer is pruned by now.

        Args:
            module: Whose parameters these are, at the next step.
            shares: The replica that has a parameter of this stage in its share, by (first) name.
            source_ranks: The global rank of each replica on this stage.
            replica_index: This rank's.
        """
        self._module, self._shares = module, shares
        self._source_ranks, self._replica_index = source_ranks, replica_index
        self._by_replica = []
        self._whole.keep_states(lambda name: shares.get(name) == replica_index)

    def remove(self) -> None:
        """Gives the optimizer back as it was."""
        self._widen()
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Lightning's closure is the training step, with its zeroing, its hooks and the clipping.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._narrow()
            return None

        def closure_and_narrow() -> Any:
            result = closure()
            self._narrow()
            return result

        if len(args) > 1:
            return (args[0], closure_and_narrow, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_narrow}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._widen()
        with self._guard(), torch.no_grad():
            for replica_index, parameters in enumerate(self._by_replica):
                for bucket in plan_buckets(parameters, BUCKET_BYTES):
                    self._broadcast([parameters[name] for name in bucket], replica_index)

    def _narrow(self) -> None:
        if self._all is not None:
            return
        self._whole.follow_groups()
        if not self._by_replica or self._dealt_names != self._whole.names:
            self._by_replica, self._dealt_names = self._dealt(), self._whole.names
        own = {id(parameter) for parameter in self._by_replica[self._replica_index].values()}
        self._all = [list(group["params"]) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]

    def _dealt(self) -> list[dict[str, nn.Parameter]]:
        """The optimizer's parameters by replica, in one order on all of them."""
        assert self._module is not None, "an optimizer steps before it is placed"
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        by_replica: list[dict[str, nn.Parameter]] = [{} for _ in self._source_ranks]
        for name, parameter in self._module.named_parameters():
            if id(parameter) in held:
                by_replica[self._shares[name]][name] = parameter
        return by_replica

    def _widen(self) -> None:
        if self._all is None:
            return
        for group, parameters in zip(self._optimizer.param_groups, self._all, strict=True):
            group["params"][:] = parameters
        self._all = None

    def _broadcast(self, parameters: list[nn.Parameter], replica_index: int) -> None:
        message = torch.cat([parameter.detach().flatten() for parameter in parameters])
        dist.broadcast(message, src=self._source_ranks[replica_index], group=self._group)
        if replica_index == self._replica_index:
            return
        parts = torch.split(message, [parameter.numel() for parameter in parameters])
        for parameter, values in zip(parameters, parts, strict=True):
            parameter.detach().copy_(values.view_as(parameter))
