"""The step of a plan, priced for the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from lightning_autopipe.core.cluster import ClusterTopology, Device
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import DeviceTimes, ModelProfile
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.workload import StepWork
from lightning_autopipe.schedules.catalog import get_schedule


def plan_step(plan: PipelinePlan, *, cluster: ClusterTopology | None = None) -> StepWork:
    """One step as a plan says.

    Where the plan's layers were not measured, forward and backward of a micro-batch through all layers take one second
    together, shared as the counted operations are.

    Args:
        plan: the plan.
        cluster: its devices' speeds and links count, rank by rank as the plan's layout has them; None: devices like the
            profiled one, and transfers that take no time.

    Raises:
        ConfigurationError: the cluster has another number of devices, or no links between two that talk.
    """
    layout = plan.layout
    devices: tuple[tuple[Device, ...], ...] = ()
    if cluster is not None:
        if cluster.world_size != layout.world_size:
            raise ConfigurationError(
                f"the plan is for {layout.world_size} ranks ({layout.num_stages} stages x {layout.num_replicas} "
                f"replicas), but the cluster has {cluster.world_size} devices; give one that fits, or none"
            )
        devices = tuple(
            tuple(cluster.devices[rank] for rank in layout.pipeline_ranks(replica_index))
            for replica_index in range(layout.num_replicas)
        )
    setting = PipelineSetting(
        cost=_cost(plan),
        num_stages=plan.num_stages,
        num_microbatches=(plan.num_microbatches,) * layout.num_replicas,
        devices=devices,
        network=None if cluster is None else LinkNetwork(cluster),
    )
    # Depths play no part: the plan names its schedule.
    step = Objective(setting).step_work(plan.partition.cut_points, (0,) * plan.num_stages)
    schedule = get_schedule(plan.schedule, plan.num_stages, plan.num_microbatches)
    return replace(step, schedules=(schedule,) * layout.num_replicas)


def boundary_bytes(step: StepWork) -> tuple[tuple[float, float], ...]:
    """For each cut the bytes of a micro-batch's activations and of its gradients."""
    units = [stage.units[0] for stage in step.stages[0]]
    return tuple((before.sent_bytes, after.gradient_bytes) for before, after in pairwise(units))


def _cost(plan: PipelinePlan) -> CostModel:
    cost = CostModel(ModelProfile(layers=plan.layers))
    if cost.is_measured:
        return cost
    every = [range(index, index + 1) for index in range(cost.num_layers)]
    forward, backward = ([cost.work_s(work, layer) for layer in every] for work in (Work.FORWARD, Work.BACKWARD))
    total = sum(forward) + sum(backward)
    times = DeviceTimes(
        device_model="not measured",
        microbatch_size=1.0,
        forward_s=tuple(units / total for units in forward),
        backward_s=tuple(units / total for units in backward),
    )
    return CostModel(ModelProfile(layers=plan.layers, times=(times,)))
