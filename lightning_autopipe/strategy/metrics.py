"""torchmetrics objects of a module whose last stage alone updates them.

* ``compute()`` gathers states over the last stages only (other stages have none), and gives the result to every rank.
* What a metric's ``forward`` says of one micro-batch is not what it says of the batch, so a twin sees the same
  arguments and is computed once a step, for ``self.log(..., on_step=True)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_autopipe.strategy.communicator import Communicator

_active: list[SharedMetrics] = []
"""What is installed. Metrics hold functions that look here, so that they can still be copied and pickled."""

_CHANGED_ATTRIBUTES = ("compute", "dist_sync_fn", "distributed_available_fn")


class SharedMetrics:
    """Makes a module's torchmetrics objects work in a pipeline, between `install` and `remove`.

    Args:
        module: Whose metrics, at any depth.
        communicator: This rank's groups.
        is_in_step: Tells whether a step runs: there only the last stages call, elsewhere all ranks do.
        is_silent: Tells whether the step runs for a plan or a trace, where nothing counts.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        communicator: Communicator,
        *,
        is_in_step: Callable[[], bool],
        is_silent: Callable[[], bool],
    ) -> None:
        self._communicator = communicator
        self._is_in_step = is_in_step
        self._is_silent = is_silent
        self._metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
        self._before: dict[str, dict[str, Any]] = {}
        self._twins: dict[int, Metric] = {}
        self._twins_by_batch: list[dict[int, Metric]] = []
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """Changes the metrics; `remove` changes them back."""
        _active.append(self)
        for name, metric in self._metrics.items():
            state = metric.__dict__
            self._before[name] = {
                attribute: state[attribute] for attribute in _CHANGED_ATTRIBUTES if attribute in state
            }
            if state["dist_sync_fn"] is None:
                state["dist_sync_fn"] = gather_over_last_stages
                state["distributed_available_fn"] = are_there_several_last_stages
            state["compute"] = self._shared_compute(state["compute"])
            self._hooks.append(metric.register_forward_hook(_tell_twin, with_kwargs=True))

    def remove(self) -> None:
        """Undoes `install`."""
        if self not in _active:
            return
        _active.remove(self)
        for hook in self._hooks:
            hook.remove()
        for name, before in self._before.items():
            state = self._metrics[name].__dict__
            for attribute in _CHANGED_ATTRIBUTES:
                state.pop(attribute, None)
            state.update(before)
        self._before, self._twins, self._twins_by_batch, self._hooks = {}, {}, [], []

    @contextlib.contextmanager
    def step(self, step_metrics: set[int], *, num_batches: int = 1) -> Iterator[None]:
        """Lets the twins of some metrics (by id) see what one step gives them; one for each batch that it runs."""
        before = self._twins_by_batch
        self._twins_by_batch = [
            {
                id(metric): (before[position].get(id(metric)) if position < len(before) else None) or _twin_of(metric)
                for metric in self._metrics.values()
                if id(metric) in step_metrics
            }
            for position in range(num_batches)
        ]
        for twins in self._twins_by_batch:
            for twin in twins.values():
                twin.reset()
        self.select(0)
        yield

    def select(self, position: int) -> None:
        """Gives what comes from now on to the twins of one of the batches that run as one pipeline."""
        self._twins = self._twins_by_batch[position]

    def step_values(self, position: int = 0) -> dict[str, Any]:
        """By module path, the values of the twins over the step that ran last and over all replicas.

        Collective over the last stages; elsewhere empty.

        Args:
            position: Of the batch, where several have run as one pipeline.
        """
        if not self._communicator.is_last_stage:
            return {}
        twins = self._twins_by_batch[position]
        return {
            name: twins[id(metric)].compute()
            for name, metric in self._metrics.items()
            # A replica without any update joins in: the others gather its empty state.
            if id(metric) in twins and (twins[id(metric)].update_called or self._communicator.layout.num_replicas > 1)
        }

    def update_twin(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives a metric's twin, if it has one in this step, the arguments that its ``forward`` was given."""
        twin = self._twins.get(id(metric))
        if twin is not None and not self._is_silent():
            # Whatever intercepts the step's operations has no business here.
            with torch._C.DisableTorchFunction():
                twin.update(*args, **kwargs)

    def _shared_compute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        communicator = self._communicator

        def compute(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_step():
                return original(*args, **kwargs)
            value = original(*args, **kwargs) if communicator.is_last_stage else None
            # Sent also where the last stage has it cached: no other rank knows whether it has.
            value = communicator.broadcast_in_pipeline(value, stage_index=communicator.layout.num_stages - 1)
            return value if communicator.is_last_stage else move_data_to_device(value, communicator.device)

        return compute

    @property
    def has_peers(self) -> bool:
        """Whether other replicas' last stages have states of the same metrics, and take part."""
        communicator = self._communicator
        return communicator.is_last_stage and communicator.layout.num_replicas > 1 and not self._is_silent()

    @property
    def communicator(self) -> Communicator:
        """This rank's groups."""
        return self._communicator


def _tell_twin(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
    if _active:
        _active[-1].update_twin(metric, args, kwargs)


def gather_over_last_stages(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """A metric state of every replica's last stage, in the order of the replicas (torchmetrics' ``dist_sync_fn``)."""
    return [gathered.to(tensor.device) for gathered in _active[-1].communicator.gather_over_replicas(tensor.detach())]


def are_there_several_last_stages() -> bool:
    """Whether metric states lie on several ranks (torchmetrics' ``distributed_available_fn``)."""
    return bool(_active) and _active[-1].has_peers


def _twin_of(metric: Metric) -> Metric:
    twin = metric.clone()
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_hooks_with_kwargs.clear()
    return twin
