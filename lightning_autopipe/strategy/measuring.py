"""Measured times in the place of counted operations, before a plan is made."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_autopipe.cluster.sysfs import cpu_model
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.profiling import (
    DEFAULT_BUDGET_S,
    LayerFindings,
    LayerShare,
    ProfilingError,
    align_layers,
    join_findings,
    measure_in_turns,
    on_device,
    optimizer_findings,
    unchanged,
)
from lightning_autopipe.profiling.assembly import assembled_profile
from lightning_autopipe.profiling.cache import ProfileCache, cache_folder
from lightning_autopipe.profiling.sizes import affordable_splits, other_splits
from lightning_autopipe.profiling.stand_ins import stand_ins
from lightning_autopipe.profiling.step_key import compute_dtype, measurement_key
from lightning_autopipe.runtime.batch import microbatch_sizes
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.planned_step import MicrobatchCapture
from lightning_autopipe.strategy.communicator import Communicator

OTHER_SIZES_FACTOR = 2.0
"""How much longer than the size in use all other sizes together may be measured."""

_CANNOT = "the layers of the step cannot be measured one by one"

_log = logging.getLogger(__name__)

T = TypeVar("T")


def measured_profile(
    pipeline: Pipeline,
    profile: ModelProfile,
    communicator: Communicator,
    *,
    step_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatches: int,
    may_fail: bool,
    sizes: Sequence[int] | None = (),
    optimizers: Sequence[Optimizer] = (),
) -> ModelProfile:
    """The profile with seconds and bytes of each layer, for micro-batches of several sizes. Collective over all ranks.

    The ranks of each device model share the layers between them, and measure at the same time, as they will train
    (docs/decisions/0009). What was measured before, for the same step on the same devices, is read from disk if global
    rank 0 finds it there (docs/decisions/0016).

    Args:
        pipeline: Of the whole module, which has profiled the step.
        profile: What it gave.
        communicator: This rank's groups.
        step_name: The step.
        args: One whole batch and what else the step takes.
        kwargs: Keyword arguments alike.
        num_microbatches: Into which the batch is split.
        may_fail: Whether to warn and give the profile as it is where the layers cannot be measured.
        sizes: Samples of other micro-batches to measure besides; None: chosen from the batch. One that cannot be run,
            or would take too long, is left out.
        optimizers: Those of a fit, whose steps are measured on copies.

    Raises:
        ProfilingError: the layers cannot be measured, and that is not allowed; on every rank alike.
    """
    measuring = _Measuring(pipeline, profile, communicator, step_name, args, kwargs, num_microbatches, optimizers)
    try:
        with stand_ins(pipeline.module, pipeline.device, on_change=lambda: pipeline.store.clear()):
            return measuring.run(sizes)
    except ProfilingError as error:
        if not may_fail:
            raise
        if communicator.global_rank == 0:
            warnings.warn(
                f"{str(error).rstrip('.')}. Stages are balanced by counted floating-point operations instead; set "
                "profile='flops' to do so without trying",
                stacklevel=2,
            )
        return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What a rank tells of itself before anything is measured."""

    global_rank: int
    device_model: str
    num_threads: int


class _Measuring:
    """One planning's measurements on this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        profile: ModelProfile,
        communicator: Communicator,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_microbatches: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._communicator = communicator
        self._step_name = step_name
        self._args = args
        self._kwargs = kwargs
        self._num_microbatches = num_microbatches
        self._optimizers = optimizers
        self._parameters = dict(pipeline.module.named_parameters())
        """Those of the optimizers."""
        self._members: list[_Member] = []
        self._own_model = ""

    def run(self, sizes: Sequence[int] | None) -> ModelProfile:
        """The profile, from disk or measured."""
        key: dict[str, Any] = {}
        splits: dict[int, int] = {}
        captures: list[MicrobatchCapture] = []
        size_in_use = 1

        def begin() -> _Member:
            nonlocal splits, size_in_use
            captures.append(self._capture(self._num_microbatches))
            batch_size = self._pipeline.splitter.batch_size(self._step_name, self._args, self._kwargs)
            least = self._pipeline.splitter.min_samples
            size_in_use = microbatch_sizes(batch_size, self._num_microbatches, min_samples=least)[0]
            splits = other_splits(batch_size, self._num_microbatches, min_samples=least, sizes=sizes)
            key.update(
                measurement_key(
                    captures[0].trace,
                    self._pipeline.module,
                    fingerprint=self._pipeline.module_fingerprint,
                    layer_names=[self._step_name, *map(str, captures[0].layer_keys)],
                    arguments=(self._args, self._kwargs),
                    sizes=[size_in_use, *splits],
                    optimizers=self._optimizers,
                    device=self._pipeline.device,
                )
            )
            self._own_model = device_model(self._pipeline.device)
            return _Member(
                global_rank=self._communicator.global_rank,
                device_model=self._own_model,
                num_threads=torch.get_num_threads(),
            )

        self._members = self._together(begin)
        key["devices"] = sorted(Counter(f"{m.device_model}, {m.num_threads} threads" for m in self._members).items())
        cache = ProfileCache(cache_folder())
        is_first = self._communicator.global_rank == 0
        # One rank decides: ranks that find other files would wait for one another.
        kept = self._together(lambda: cache.load(key, self._profile) if is_first else None)
        known = next((found for found in kept if found is not None), None)
        if known is not None:
            return known
        with contextlib.ExitStack() as stack:
            findings = self._findings(captures[0], size_in_use, splits, stack)
        measured = assembled_profile(
            self._profile,
            findings,
            size_in_use=size_in_use,
            reference_model=next(m.device_model for m in self._members if m.global_rank == 0),
            dtype=str(compute_dtype(self._pipeline.module, self._pipeline.device)).removeprefix("torch."),
        )
        if is_first:
            cache.save(key, measured)
        return measured

    def _findings(
        self, capture: MicrobatchCapture, size_in_use: int, splits: Mapping[int, int], stack: contextlib.ExitStack
    ) -> dict[int, dict[str, LayerFindings]]:
        """What all ranks find together, by size and device model."""
        shares: dict[int, LayerShare] = {}

        def begin() -> float:
            stack.enter_context(self._pipeline.silent())
            stack.enter_context(on_device(self._pipeline.module, self._pipeline.device))
            stack.enter_context(unchanged(self._pipeline.module, capture.trace.written_parameters))
            shares[size_in_use] = self._share(capture)
            return shares[size_in_use].least_s

        least_s = max(self._together(begin))
        budget_s = OTHER_SIZES_FACTOR * max(DEFAULT_BUDGET_S, least_s)
        chosen, left_out = affordable_splits(splits, least_s=least_s, size_in_use=size_in_use, budget_s=budget_s)
        for size in left_out:
            self._note_left_out(size, "that would take too long")
        for size, number in chosen.items():

            def begin_other(size: int = size, number: int = number) -> None:
                shares[size] = self._share(self._capture(number))

            problem = ""
            try:
                self._together(begin_other)
            except ProfilingError as error:
                problem = str(error)  # alone: the error holds on to tensors
            if problem:
                shares.pop(size, None)
                self._note_left_out(size, problem)

        def measure() -> dict[int, LayerFindings | str]:
            found = measure_in_turns(shares, DEFAULT_BUDGET_S * (OTHER_SIZES_FACTOR if len(shares) > 1 else 1))
            in_use = found[size_in_use]
            if isinstance(in_use, LayerFindings):
                device = self._pipeline.device
                costs = optimizer_findings(capture.trace, self._parameters, in_use.layers, self._optimizers, device)
                found[size_in_use] = replace(in_use, optimizer=costs)
            return found

        told = self._together(measure)
        findings: dict[int, dict[str, LayerFindings]] = {}
        for size in shares:
            of_ranks = [of_rank[size] for of_rank in told]
            problems = [found for found in of_ranks if isinstance(found, str)]
            if not problems:
                findings[size] = self._by_model([found for found in of_ranks if isinstance(found, LayerFindings)])
            elif size == size_in_use:
                raise ProfilingError(f"{_CANNOT}: {problems[0]}")
            else:
                self._note_left_out(size, problems[0])
        return findings

    def _note_left_out(self, size: int, problem: str) -> None:
        _log.info("micro-batches of %d samples are left out of the profile: %s", size, problem)
        if self._pipeline.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _by_model(self, found: Sequence[LayerFindings]) -> dict[str, LayerFindings]:
        """What the ranks of each device model have found together."""
        by_model: dict[str, list[LayerFindings]] = {}
        for member, findings in zip(self._members, found, strict=True):
            by_model.setdefault(member.device_model, []).append(findings)
        return {model: join_findings(findings) for model, findings in by_model.items()}

    def _share(self, capture: MicrobatchCapture) -> LayerShare:
        module = self._pipeline.module
        members = [m.global_rank for m in self._members if m.device_model == self._own_model]
        return LayerShare(
            capture.trace,
            capture.table,
            module,
            getattr(module, self._step_name),
            capture.args,
            capture.kwargs,
            device=self._pipeline.device,
            member_index=members.index(self._communicator.global_rank),
            num_members=len(members),
        )

    def _capture(self, num_microbatches: int) -> MicrobatchCapture:
        with self._pipeline.silent():
            capture = self._pipeline.planned_step.capture_microbatch(
                self._step_name, self._args, self._kwargs, num_microbatches
            )
            capture.trace.layers = align_layers(capture.trace, capture.table, capture.layer_keys)
        return capture

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What every rank's work gives, on all of them.

        Raises:
            ProfilingError: that of one fails; on every rank, so that none waits for one that has given up.
        """
        own: T | None = None
        cause: Exception | None = None
        problem = ""
        try:
            own = work()
        except Exception as error:
            cause, problem = error, f"{type(error).__name__}: {error}"
        told = self._communicator.gather_over_replicas(self._communicator.gather_in_pipeline((problem, own)))
        of_ranks = [of_rank for of_pipeline in told for of_rank in of_pipeline]
        problems = [problem for problem, _ in of_ranks if problem]
        if problems:
            raise ProfilingError(f"{_CANNOT}: {problems[0]}") from cause
        return [found for _, found in of_ranks]


def device_model(device: torch.device) -> str:
    """The name of a device's model, as clusters and profiles have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(Path("/proc"))
