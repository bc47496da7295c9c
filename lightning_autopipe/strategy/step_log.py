"""``self.log`` inside the four steps of a pipeline.

A step runs once for each micro-batch, and its end only on the last stage. Logging there and then would give the last
micro-batch's value, on one rank. So calls are *recorded*, with all arguments checked as Lightning's own ``log`` checks
them; after the step the values are aggregated over micro-batches and replicas, shared with every rank, and *replayed*
there through the original ``log``. Metrics, monitors and schedulers then see the same numbers everywhere.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from torch import Tensor
from torchmetrics import Metric

from lightning_autopipe.strategy.aggregate import Aggregate

_DROPPED_ARGUMENTS = ("sync_dist", "sync_dist_group", "enable_graph", "batch_size")
"""What a replay sets itself: values are the same everywhere, detached, and carry their own batch size."""


class RunningPipeline(Protocol):
    """What recording needs of the pipeline."""

    @property
    def microbatch_index(self) -> int: ...

    def value_weight(self, tensor: Tensor) -> Tensor | None: ...

    def owned_call(self, function: Callable[..., None], *tensors: Tensor) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One micro-batch's value of one call."""

    microbatch_index: int
    value: Tensor
    derived_weight: Tensor | None
    batch_size: float | None


@dataclass(slots=True, kw_only=True)
class LoggedCall:
    """One ``self.log`` of a step, over the micro-batches in which it ran."""

    name: str
    arguments: dict[str, Any]
    """Arguments of the original ``log``, without name, value and `_DROPPED_ARGUMENTS`."""
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    metric_attribute: str | None = None
    """Module path of the torchmetrics object that was logged; None for a number."""
    entries: list[tuple[int, float, float | None, float | None]] = field(default_factory=list)
    """Micro-batch index, value, derived weight, batch size."""
    aggregate: Aggregate = field(default_factory=Aggregate)
    batch_size: float = 0.0
    step_value: Any = None
    """A torchmetrics object's value over the step, where it is logged by step."""


LogKey = tuple[int, str, int]
"""Stage index, name, and how many calls with that name came before in the micro-batch."""


@dataclass(slots=True)
class _Records:
    """What one batch's step has logged on this rank."""

    calls: dict[LogKey, LoggedCall] = field(default_factory=dict)
    entries: dict[LogKey, list[_Entry]] = field(default_factory=dict)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)


class StepRecorder:
    """Takes the place of a module's ``log`` while a step runs, and keeps what was logged."""

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: RunningPipeline,
        *,
        stage_index: int,
        is_silent: Callable[[], bool],
    ) -> None:
        self._module = module
        self._is_silent = is_silent
        self._pipeline = pipeline
        self._stage_index = stage_index
        self._original: Callable[..., None] = module.log
        self._signature = inspect.signature(pl.LightningModule.log.__get__(module))  # the user's may take *args
        self._by_batch: dict[int, _Records] = {}
        self._records = _Records()
        self._silenced_names: set[str] = set()
        self.step_metrics: set[int] = set()
        """Ids of the torchmetrics objects that the step logs by step, as far as a trace or a step has shown it."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records instead of logging, until the end of the context."""
        self._by_batch = {}
        self.select(0)
        # An attribute of the object hides the method of its class, also from `log_dict`.
        attributes = vars(self._module)
        between_steps = attributes.get("log")
        attributes["log"] = self._log
        try:
            yield
        finally:
            if between_steps is None:
                del attributes["log"]
            else:
                attributes["log"] = between_steps

    def select(self, position: int) -> None:
        """Keeps what is logged from now on for one of the batches that run as one pipeline."""
        self._records = self._by_batch.setdefault(position, _Records())

    def _log(self, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:
            self._original(*args, **kwargs)  # says it in its own name
            raise
        value = arguments["value"]
        if isinstance(value, Metric) and _is_logged_by_step(self._module, arguments):
            self.step_metrics.add(id(value))
        tensors = (value,) if isinstance(value, Tensor) else ()
        self._pipeline.owned_call(lambda *_: self._record(arguments), *tensors)

    def _record(self, arguments: dict[str, Any]) -> None:
        if self._is_silent():
            return
        checked = check_as_lightning_does(self._module, self._original, arguments)
        if checked is None:
            return
        meta, value = checked
        name = arguments["name"]
        microbatch_index = self._pipeline.microbatch_index
        records = self._records
        count = records.counts.get((microbatch_index, name), 0)
        records.counts[microbatch_index, name] = count + 1
        key = (self._stage_index, name, count)
        if key not in records.calls:
            dropped = ("self", "name", "value", *_DROPPED_ARGUMENTS)
            records.calls[key] = LoggedCall(
                name=name,
                arguments={argument: given for argument, given in arguments.items() if argument not in dropped},
                reduction=meta.reduce_fx.__name__,
            )
        call = records.calls[key]
        if isinstance(value, Metric):
            call.metric_attribute = meta.metric_attribute
            call.arguments.pop("metric_attribute", None)
            return
        call.dtype = value.dtype
        original_value = arguments["value"]
        records.entries.setdefault(key, []).append(
            _Entry(
                microbatch_index=microbatch_index,
                value=value,
                derived_weight=self._pipeline.value_weight(original_value)
                if isinstance(original_value, Tensor)
                else None,
                batch_size=arguments.get("batch_size"),
            )
        )

    def take(self, position: int = 0) -> dict[LogKey, LoggedCall]:
        """What the last step logged on this rank, in host memory: one wait for the device, however many values.

        Args:
            position: Of the batch, where several have run as one pipeline.
        """
        records = self._by_batch.pop(position, _Records())
        entries = [entry for group in records.entries.values() for entry in group]
        weights = [entry.derived_weight for entry in entries if entry.derived_weight is not None]
        numbers = iter(_to_host([entry.value for entry in entries]))
        weight_numbers = iter(_to_host(weights))
        for key, group in records.entries.items():
            for entry in group:
                weight = None if entry.derived_weight is None else next(weight_numbers)
                batch_size = None if entry.batch_size is None else float(entry.batch_size)
                records.calls[key].entries.append((entry.microbatch_index, next(numbers), weight, batch_size))
        return records.calls

    def replay(self, calls: Sequence[LoggedCall], device: torch.device) -> None:
        """Logs on this rank what the step logged on all of them, through the module's own ``log``."""
        log = self._original
        for call in calls:
            if call.metric_attribute is not None:
                metric = self._module.get_submodule(call.metric_attribute)
                assert isinstance(metric, Metric)
                metric._forward_cache = _to_device(call.step_value, device)
                log(call.name, metric, **call.arguments, metric_attribute=call.metric_attribute)
                continue
            is_floating = call.dtype.is_floating_point and call.dtype.itemsize >= 4
            dtype = call.dtype if is_floating else torch.get_default_dtype()
            value = torch.tensor(call.aggregate.value(call.reduction), dtype=dtype, device=device)
            is_count = call.batch_size == int(call.batch_size)
            batch_size = int(call.batch_size) if is_count else call.batch_size
            self._silence_sync_dist_advice(call.name)
            log(call.name, value, **call.arguments, batch_size=batch_size, sync_dist=False)

    def _silence_sync_dist_advice(self, name: str) -> None:
        # Lightning advises sync_dist=True for epoch values; a replayed value is that of all replicas already.
        if name not in self._silenced_names:
            warnings.filterwarnings("ignore", message=re.escape(f"It is recommended to use `self.log({name!r}"))
            self._silenced_names.add(name)


def aggregate_microbatches(
    calls: dict[LogKey, LoggedCall], *, sizes: Sequence[int], loss_weights: Sequence[float]
) -> None:
    """Turns the entries of each call into its aggregate over the micro-batches of one replica.

    A value's weight is the one derived for it (a known mean); else the loss's, where that is not the number of samples;
    else the ``batch_size`` that the user gave; else the number of samples.

    Args:
        calls: As recorded; changed in place.
        sizes: Samples by micro-batch.
        loss_weights: Weight of the loss by micro-batch; empty where there is none.
    """
    loss_has_weights = bool(loss_weights) and any(
        weight != size for weight, size in zip(loss_weights, sizes, strict=True)
    )
    for call in calls.values():
        for microbatch_index, value, derived_weight, batch_size in call.entries:
            samples = float(sizes[microbatch_index])
            if derived_weight is not None:
                weight = derived_weight
            elif loss_has_weights:
                weight = loss_weights[microbatch_index]
            else:
                weight = samples if batch_size is None else batch_size
            call.aggregate.add(value, weight)
            call.batch_size += samples if batch_size is None else batch_size
        call.entries = []


def merge_replicas(replicas: Sequence[dict[LogKey, LoggedCall]]) -> list[LoggedCall]:
    """The calls of all replicas as one list, in the order of the first replica that made them."""
    merged: dict[LogKey, LoggedCall] = {}
    for calls in replicas:
        for key, call in calls.items():
            if key not in merged:
                merged[key] = call
                continue
            merged[key].aggregate.merge(call.aggregate)
            merged[key].batch_size += call.batch_size
    return list(merged.values())


def check_as_lightning_does(
    module: pl.LightningModule, original: Callable[..., None], arguments: dict[str, Any]
) -> tuple[_Metadata, Any] | None:
    """Runs the original ``log`` up to the point where it would store the value; None where it ignores the call."""
    results = module.trainer._results
    stored: list[tuple[_Metadata, Any]] = []

    def store(fx: str, name: str, value: Any, **resolved: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx")
        meta = _Metadata(
            fx=fx, name=name, metric_attribute=resolved.get("metric_attribute"), **{n: resolved[n] for n in names}
        )
        stored.append((meta, value))

    call = {name: value for name, value in arguments.items() if name != "self"}
    if results is None:
        original(**call)  # raises what Lightning says about it
        return None
    results.__dict__["log"] = store
    try:
        original(**call)
    finally:
        del results.__dict__["log"]
    return stored[0] if stored else None


def _is_logged_by_step(module: pl.LightningModule, arguments: dict[str, Any]) -> bool:
    on_step = arguments.get("on_step")
    # Lightning's default: by step in training_step, by epoch in validation_step and test_step.
    return module._current_fx_name == "training_step" if on_step is None else bool(on_step)


def _to_host(tensors: Sequence[Tensor]) -> list[float]:
    if not tensors:
        return []
    numbers: list[float] = torch.stack([tensor.detach().to(torch.float64).reshape(()) for tensor in tensors]).tolist()
    return numbers


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
