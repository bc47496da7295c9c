"""What a partition of the layers and depths of the warm-up are worth: the predicted step, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.links import LinkNetwork, Route, alike_devices
from lightning_autopipe.planner.memory import StageMemory, stage_memory
from lightning_autopipe.planner.reduction import GradientBytes, Reduction, step_end_reductions
from lightning_autopipe.planner.replica import Cuts, Depths, ReplicaPrices
from lightning_autopipe.planner.simulator import simulated_s
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules.one_f_one_b import one_f_one_b

_schedule = lru_cache(maxsize=64)(one_f_one_b)
_ACTIONS_OF_BOUND = 8
"""A bound takes about as long for each stage as so many actions of the recurrence."""
_ACTIONS_OF_SIMULATED = 20
"""And an action of the simulator as long as so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetting:
    """All that is given when layers are shared between stages."""

    cost: CostModel
    num_stages: int
    num_microbatches: tuple[int, ...]
    """Of each replica."""
    devices: tuple[tuple[Device, ...], ...] = ()
    """``devices[r][s]`` runs stage s of replica r; empty: devices like the profiled one, with all the memory needed."""
    network: LinkNetwork | None = None
    """Links between the devices; None: whatever is sent is there at once."""
    microbatch_size: float | None = None
    """Samples; None: as profiled."""
    exchange_s: float = 0.0
    """What all ranks take to agree on one number at the step's end."""
    optimizer_state_ratio: float = 2.0
    """Bytes of optimizer state for each byte of trainable parameters."""
    optimizer_shares: int = 1
    """Replicas that share a stage's optimizer state."""
    cuts: Cuts | None = None
    """Of the layers, where they are given; None: they are chosen."""

    def __post_init__(self) -> None:
        if not self.num_microbatches or any(number < 1 for number in self.num_microbatches):
            raise PlanError(f"PipelineSetting: num_microbatches must be >= 1, one a replica: {self.num_microbatches}")
        counts = [len(devices) for devices in self.devices]
        if counts and counts != [self.num_stages] * len(self.num_microbatches):
            raise PlanError(
                f"PipelineSetting: {len(self.num_microbatches)} replicas of {self.num_stages} stages need as many "
                f"devices each, got {counts}"
            )
        if self.network is not None and not self.devices:
            raise PlanError("PipelineSetting: a network is given without the devices that it joins")

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """``ranks[r][s]`` runs stage s of replica r."""
        if self.devices:
            return tuple(tuple(device.global_rank for device in devices) for devices in self.devices)
        layout = ParallelLayout(num_stages=self.num_stages, num_replicas=len(self.num_microbatches))
        return tuple(layout.pipeline_ranks(replica_index) for replica_index in range(layout.num_replicas))

    def route(self, sender: int, receiver: int) -> Route:
        """The way between two ranks."""
        return Route() if self.network is None else self.network.route(sender, receiver)

    def with_stages_per_rank(self, stages_per_rank: int) -> PipelineSetting:
        """The same ranks, each with so many stages, which go round the ranks."""
        if stages_per_rank == 1:
            return self
        devices = self.devices
        if not devices:
            alike = alike_devices(self.num_stages * len(self.num_microbatches)).topology.devices
            devices = tuple(tuple(alike[rank] for rank in ranks) for ranks in self.ranks)
        return replace(
            self,
            num_stages=stages_per_rank * self.num_stages,
            devices=tuple(stages_per_rank * of_replica for of_replica in devices),
            cuts=None,
        )


_MEMORIES: WeakKeyDictionary[CostModel, dict[object, dict[tuple[int, int], StageMemory]]] = WeakKeyDictionary()
"""Of ranges of layers, whatever the devices: searches make many objectives of one model."""


class Objective:
    """Prices cuts and depths in one setting, by the recurrence: links count, but not that transfers share them."""

    def __init__(self, setting: PipelineSetting) -> None:
        self.setting = setting
        self.num_layers = setting.cost.num_layers
        self.num_priced_actions = 0
        """Actions that were gone through, and as many for bounds as take as long: what a search has cost so far."""
        self._ranks = setting.ranks
        self._stage_ranks = tuple(zip(*self._ranks, strict=True))
        self.shares_links = self._find_shared_links()
        """Whether messages between unlike pairs of ranks meet on a link, so that `step_s` may be too short."""
        self._replicas = self._price_replicas()
        self._unlike = tuple(dict.fromkeys(self._replicas))
        self._gradients = GradientBytes(setting.cost)
        self._rings: dict[tuple[int, ...], list[Route]] = {}
        optimizer = setting.optimizer_state_ratio, setting.optimizer_shares
        self._memories = _MEMORIES.setdefault(setting.cost, {}).setdefault(
            (max(setting.num_microbatches), setting.microbatch_size, *optimizer), {}
        )
        self._overflows: dict[tuple[int, int, int, int], int] = {}
        has_optimizer = any(replica.has_optimizer for replica in self._unlike)
        self._only_computes = len(self._ranks) == 1 and not setting.cost.ties and not has_optimizer

    def _price_replicas(self) -> list[ReplicaPrices]:
        """Of each replica; those that are alike are one."""
        setting = self.setting
        found: dict[object, ReplicaPrices] = {}
        replicas = []
        for replica_index, num_microbatches in enumerate(setting.num_microbatches):
            devices = setting.devices[replica_index] if setting.devices else (None,) * setting.num_stages
            routes = [(setting.route(a, b), setting.route(b, a)) for a, b in pairwise(self._ranks[replica_index])]
            speeds = tuple((device.model, device.relative_speed) if device else None for device in devices)
            kind = (num_microbatches, speeds, tuple(routes))
            if kind not in found:
                found[kind] = ReplicaPrices(
                    setting.cost,
                    devices,
                    routes,
                    num_microbatches=num_microbatches,
                    microbatch_size=setting.microbatch_size,
                )
            replicas.append(found[kind])
        return replicas

    def _find_shared_links(self) -> bool:
        if self.setting.network is None:
            return False
        pairs = [pair for ranks in self._ranks for a, b in pairwise(ranks) for pair in ((a, b), (b, a))]
        if len(self._ranks) > 1:
            rings = [Reduction(is_tie=False, members=members, num_bytes=1) for members in self._stage_ranks]
            pairs += [hop for ring in rings for hop in ring.hops]
        used = [channel for pair in dict.fromkeys(pairs) for channel in self.setting.route(*pair).channels]
        return len(set(used)) < len(used)

    # Time ------------------------------------------------------------------

    def step_s(self, cuts: Cuts, depths: Depths) -> float:
        """Seconds of a step under 1F1B."""
        ends = {replica: replica.ends(cuts, depths) for replica in self._unlike}
        self.num_priced_actions += sum(2 * len(depths) * replica.num_microbatches for replica in self._unlike)
        if self._only_computes:
            return max(max(of_stages) for of_stages in ends.values()) + self.setting.exchange_s
        ready: dict[int, float] = {}
        for ranks, replica in zip(self._ranks, self._replicas, strict=True):
            ready.update(zip(ranks, ends[replica], strict=True))
        tied_bytes = self.tied_bytes(cuts)
        for reduction in step_end_reductions(self._stage_ranks, tied_bytes.items(), self._gradients.of_stages(cuts)):
            end = max(ready[rank] for rank in reduction.members) + self._ring_s(reduction)
            ready.update(dict.fromkeys(reduction.members, end))
        if self.setting.exchange_s:
            ready = dict.fromkeys(ready, max(ready.values()) + self.setting.exchange_s)
        return max(
            ready[rank] + seconds
            for ranks, replica in zip(self._ranks, self._replicas, strict=True)
            for rank, seconds in zip(ranks, replica.optimizer_s(cuts), strict=True)
        )

    def predicted_s(self, cuts: Cuts, depths: Depths) -> float:
        """Like `step_s`, but by the simulator where transfers share links: then longer, and slower to know."""
        if not self.shares_links:
            return self.step_s(cuts, depths)
        self.num_priced_actions += _ACTIONS_OF_SIMULATED * 2 * len(depths) * sum(self.setting.num_microbatches)
        return simulated_s(self.step_work(cuts, depths))

    def bound_s(self, cuts: Cuts, depths: Depths) -> float:
        """What a step takes at least; quicker to know than `step_s`, and never above it."""
        self.num_priced_actions += _ACTIONS_OF_BOUND * len(depths) * len(self._unlike)
        return max(replica.bound_s(cuts, depths) for replica in self._unlike) + self.setting.exchange_s

    def stage_s(self, cuts: Cuts) -> list[float]:
        """Seconds of forward and backward of one micro-batch on each stage, on the replica that takes longest."""
        return [
            max(map(sum, stage)) for stage in zip(*(replica.stage_s(cuts) for replica in self._unlike), strict=True)
        ]

    def stage_prefixes(self) -> list[list[float]]:
        """By stage, prefix sums over the layers of forward and backward of one micro-batch."""
        return self._of_slowest(lambda replica, stage_index: replica.weights(stage_index, 1.0, 1.0))

    def bound_weights(self, depths: Depths) -> tuple[list[list[float]], list[list[float]]]:
        """What stages add to the least step, as in `ReplicaPrices.bound_s`.

        Returns:
            By stage, prefix sums of what layers add; and by stage the price of beginning at each layer.
        """

        def adds(replica: ReplicaPrices, stage_index: int) -> list[float]:
            rest = replica.num_microbatches - 1
            return replica.weights(stage_index, max(0, rest - depths[stage_index]), rest)

        return self._of_slowest(adds), self._of_slowest(lambda replica, stage_index: replica.entries(stage_index))

    def _of_slowest(self, prices: Callable[[ReplicaPrices, int], list[float]]) -> list[list[float]]:
        stages = range(self.setting.num_stages)
        return [max((prices(replica, stage) for replica in self._unlike), key=max) for stage in stages]

    # The step's end --------------------------------------------------------

    def tied_bytes(self, cuts: Cuts) -> dict[tuple[int, ...], int]:
        """Stages that share parameters, and the bytes of their gradients."""
        cost = self.setting.cost
        return cost.tied_bytes(Partition(cut_points=cuts, num_layers=self.num_layers)) if cost.ties else {}

    def _ring_s(self, reduction: Reduction) -> float:
        routes = self._rings.get(reduction.members)
        if routes is None:
            routes = self._rings[reduction.members] = [self.setting.route(*hop) for hop in reduction.hops]
        hop_bytes, num_rounds = reduction.hop_bytes, reduction.num_rounds
        return max(route.occupied_s(hop_bytes) + num_rounds * route.latency_s for route in routes)

    # Memory ----------------------------------------------------------------

    def overflow_bytes(self, cuts: Cuts, depths: Depths) -> int:
        """By how much all stages together exceed their devices' memory."""
        if not self.setting.devices:
            return 0
        overflows, edges = self._overflows, (0, *cuts, self.num_layers)
        overflow_bytes = 0
        for place in zip(range(len(depths)), edges, edges[1:], depths, strict=False):
            if place not in overflows:
                overflows[place] = self.stage_overflow_bytes(*place)
            overflow_bytes += overflows[place]
        return overflow_bytes

    def stage_overflow_bytes(self, stage_index: int, start: int, stop: int, depth: int) -> int:
        """By how much one stage exceeds the memory of its devices, those of all replicas together."""
        memory = self.memory(start, stop)
        return sum(
            max(0, memory.peak_bytes(min(depth + 1, num_microbatches)) - devices[stage_index].memory_bytes)
            for devices, num_microbatches in zip(self.setting.devices, self.setting.num_microbatches, strict=True)
        )

    def memory(self, start: int, stop: int) -> StageMemory:
        """What a stage that owns layers start to stop - 1 holds."""
        if (start, stop) not in self._memories:
            self._memories[start, stop] = stage_memory(
                self.setting.cost,
                range(start, stop),
                num_microbatches=max(self.setting.num_microbatches),
                microbatch_size=self.setting.microbatch_size,
                optimizer_state_ratio=self.setting.optimizer_state_ratio,
                optimizer_shares=self.setting.optimizer_shares,
            )
        return self._memories[start, stop]

    # The same for the simulator --------------------------------------------

    def step_work(self, cuts: Cuts, depths: Depths) -> StepWork:
        """The step as `simulate` takes it, which also sees that transfers share links."""
        setting = self.setting
        return StepWork(
            stages=self.stage_works(cuts),
            schedules=tuple(_schedule(setting.num_stages, number, depths) for number in setting.num_microbatches),
            ranks=self._ranks,
            network=setting.network,
            tied_bytes=tuple(self.tied_bytes(cuts).items()),
            exchange_s=setting.exchange_s,
        )

    def stage_works(self, cuts: Cuts) -> tuple[tuple[StageWork, ...], ...]:
        """``[r][s]``: what stage s of replica r has to do for whole micro-batches, and holds."""
        return tuple(self._stage_work(replica, cuts) for replica in self._replicas)

    def _stage_work(self, replica: ReplicaPrices, cuts: Cuts) -> tuple[StageWork, ...]:
        cost, size = self.setting.cost, self.setting.microbatch_size
        edges = (0, *cuts, self.num_layers)
        optimizer_s, reduced_bytes = replica.optimizer_s(cuts), self._gradients.of_stages(cuts)
        work = []
        for stage_index, (forward_s, backward_s) in enumerate(replica.stage_s(cuts)):
            start, stop = edges[stage_index], edges[stage_index + 1]
            memory = self.memory(start, stop)
            unit = UnitWork(
                forward_s=forward_s,
                backward_s=backward_s,
                sent_bytes=cost.sent_bytes(stop, microbatch_size=size),
                gradient_bytes=cost.gradient_bytes(start, microbatch_size=size),
            )
            work.append(
                StageWork(
                    units=(unit,),
                    optimizer_s=optimizer_s[stage_index],
                    reduced_bytes=reduced_bytes[stage_index],
                    fixed_bytes=memory.fixed_bytes,
                    stash_bytes=memory.stash_bytes,
                    working_bytes=memory.working_bytes,
                )
            )
        return tuple(work)
