"""What a new plan would gain where stages take other times than planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.stage_times import StageTimes, stage_times
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.links import LinkNetwork, alike_devices
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.plan_step import plan_step
from lightning_autopipe.planner.simulator import simulate, simulated_s

EFFORT = 100_000
"""Actions that the search may simulate: a tenth of a second or two, in the middle of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """A plan and a better one, both under measured times."""

    step_s: float
    """Of the plan that runs."""
    partition: Partition
    """Of the better one; the same layout and schedule."""
    new_step_s: float

    @property
    def gain(self) -> float:
        """By what share steps would be shorter, 0 to 1."""
        return 1 - self.new_step_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRatio:
    """How much longer than planned one rank's stage takes: 1 is as planned."""

    times: StageTimes
    """As measured."""
    forward: float
    backward: float
    whole: float
    """Of forwards and backwards together."""


def planned_stage_times(plan: PipelinePlan, *, cluster: ClusterTopology | None = None) -> tuple[StageTimes, ...]:
    """Seconds of each rank's stages in a step, as a plan of measured layers predicts them.

    Raises:
        ConfigurationError: the cluster does not fit the plan.
    """
    return stage_times(simulate(plan_step(plan, cluster=cluster)))


def stage_ratios(planned: Iterable[StageTimes], measured: Iterable[StageTimes]) -> tuple[StageRatio, ...]:
    """Measured against planned seconds, of stages that are among both.

    Args:
        planned: of a step.
        measured: of one of as many samples.
    """
    by_place = {times.place: times for times in planned}
    ratios = []
    for times in measured:
        then = by_place.get(times.place)
        if then is not None and then.compute_s:
            ratios.append(
                StageRatio(
                    times=times,
                    forward=_ratio(times.forward_s, then.forward_s),
                    backward=_ratio(times.backward_s, then.backward_s),
                    whole=times.compute_s / then.compute_s,
                )
            )
    return tuple(ratios)


def replan(
    plan: PipelinePlan, ratios: Sequence[StageRatio], *, cluster: ClusterTopology | None = None
) -> Replanning | None:
    """The best partition for times as measured, with the plan's own devices, micro-batches and schedule.

    What takes longer is taken to be a stage's layers, wherever they run; where it is the device, a new plan gains more.

    Args:
        plan: that runs, with layers that were measured.
        ratios: of all its stages; of replicas the slowest one counts.
        cluster: what the plan is for.

    Raises:
        ConfigurationError: no partition fits the memory.

    Returns:
        None for plans that are not searched like this: several stages a rank, unlike numbers of replicas.
    """
    num_replicas = plan.mapping.num_replicas
    if num_replicas is None or plan.num_stages * num_replicas != len(plan.mapping.ranks):
        return None
    factors: dict[int, tuple[float, float]] = {}
    for ratio in ratios:
        forward, backward = factors.get(ratio.times.stage_index, (0.0, 0.0))
        factors[ratio.times.stage_index] = max(forward, ratio.forward), max(backward, ratio.backward)
    repriced = _repriced(plan, factors)
    step_s = simulated_s(plan_step(repriced, cluster=cluster))
    choice = choose_partition(
        _setting(repriced, num_replicas, cluster), depths=plan.schedule.depths or None, effort=EFFORT
    )
    new_step_s = simulated_s(plan_step(replace(repriced, partition=choice.partition), cluster=cluster))
    if new_step_s >= step_s:
        return Replanning(step_s=step_s, partition=plan.partition, new_step_s=step_s)
    return Replanning(step_s=step_s, partition=choice.partition, new_step_s=new_step_s)


def _setting(plan: PipelinePlan, num_replicas: int, cluster: ClusterTopology | None) -> PipelineSetting:
    """What is given, and not searched."""
    devices = plan.devices if cluster is None else cluster.devices
    if not devices:
        devices = alike_devices(plan.mapping.ranks[-1] + 1).topology.devices
    grid = [plan.mapping.pipeline_ranks(replica_index) for replica_index in range(num_replicas)]
    return PipelineSetting(
        cost=CostModel(plan.profile),
        num_stages=plan.num_stages,
        num_microbatches=plan.replica_microbatches or (plan.num_microbatches,) * num_replicas,
        devices=tuple(tuple(devices[rank] for rank in ranks) for ranks in grid),
        network=None if cluster is None else LinkNetwork(cluster),
    )


def _repriced(plan: PipelinePlan, factors: Mapping[int, tuple[float, float]]) -> PipelinePlan:
    """The plan with layers as slow as their stage was measured to be."""
    by_layer = [factors.get(plan.partition.layer_stage(index), (1.0, 1.0)) for index in range(len(plan.layers))]
    forward, backward = zip(*by_layer, strict=True)
    layers = tuple(
        layer
        if layer.measured is None
        else replace(
            layer,
            measured=replace(
                layer.measured,
                forward_s=f * layer.measured.forward_s,
                backward_s=b * layer.measured.backward_s,
                backward_weight_s=b * layer.measured.backward_weight_s,
                backward_split_s=b * layer.measured.backward_split_s,
            ),
        )
        for layer, f, b in zip(plan.layers, forward, backward, strict=True)
    )
    times = tuple(
        replace(
            table,
            forward_s=_scaled(table.forward_s, forward),
            backward_s=_scaled(table.backward_s, backward),
            backward_weight_s=_scaled(table.backward_weight_s, backward),
            backward_split_s=_scaled(table.backward_split_s, backward),
        )
        for table in plan.times
    )
    return replace(plan, layers=layers, times=times)


def _scaled(seconds: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(factor * value for factor, value in zip(factors, seconds, strict=False))


def _ratio(measured_s: float, planned_s: float) -> float:
    return measured_s / planned_s if planned_s else 1.0
