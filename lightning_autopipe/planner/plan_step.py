"""The step of a plan, priced for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_autopipe.core.cluster import ClusterTopology, Device
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import DeviceTimes, ModelProfile
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork, alike_devices
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.scheduled_work import scheduled_work
from lightning_autopipe.planner.unequal import unequal_step_work
from lightning_autopipe.planner.workload import StepWork


def plan_step(plan: PipelinePlan, *, cluster: ClusterTopology | None = None) -> StepWork:
    """One step as a plan says.

    Where the plan's layers were not measured, forward and backward of a micro-batch through all layers take one second
    together, shared as the counted operations are.

    Args:
        plan: the plan.
        cluster: its devices' speeds and links count, rank by rank as the plan maps them; None: the devices that the
            plan is for, or like the profiled one, and transfers that take no time.

    Raises:
        ConfigurationError: the cluster has another number of devices, or no links between two that talk.
    """
    mapping = plan.mapping
    devices = plan.devices
    if cluster is not None:
        num_ranks = len(plan.devices) or mapping.ranks[-1] + 1
        if cluster.world_size != num_ranks:
            counts = [len(ranks) for ranks in mapping.stage_ranks]
            replicas = f"{mapping.num_replicas} replicas" if mapping.num_replicas else f"{counts} replicas"
            raise ConfigurationError(
                f"the plan is for {num_ranks} ranks ({plan.num_stages} stages x {replicas}), but the cluster has "
                f"{cluster.world_size} devices; give one that fits, or none"
            )
        devices = cluster.devices
    network = None if cluster is None else LinkNetwork(cluster)
    cost = _cost(plan)
    if mapping.num_replicas is None:
        return unequal_step_work(
            cost,
            plan.partition,
            mapping,
            network=network or _without_links(devices),
            num_microbatches=plan.num_microbatches,
            windows=plan.schedule.depths or None,
        )
    grid = [mapping.pipeline_ranks(replica_index) for replica_index in range(mapping.num_replicas)]
    if not devices:
        devices = alike_devices(mapping.ranks[-1] + 1).topology.devices
    setting = PipelineSetting(
        cost=cost,
        num_stages=mapping.num_stages,
        num_microbatches=plan.replica_microbatches or (plan.num_microbatches,) * mapping.num_replicas,
        devices=tuple(tuple(devices[rank] for rank in ranks) for ranks in grid),
        network=network,
    )
    return scheduled_work(setting, plan.partition.cut_points, plan.schedule)


def _without_links(devices: Sequence[Device]) -> LinkNetwork | None:
    """The devices side by side, so that whatever is sent is there at once; None where they are not known."""
    together = tuple(replace(device, server="one server") for device in devices)
    return LinkNetwork(ClusterTopology(devices=together)) if together else None


def boundary_bytes(step: StepWork) -> tuple[tuple[float, float], ...]:
    """For each cut the bytes of a micro-batch's activations and of its gradients."""
    units = [step.stages[0][first].units[0] for first, *_ in step.lists_by_stage]
    return tuple((before.sent_bytes, after.gradient_bytes) for before, after in pairwise(units))


def _cost(plan: PipelinePlan) -> CostModel:
    cost = CostModel(plan.profile)
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
