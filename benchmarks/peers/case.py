"""One model on one cluster, with the plans that each planner makes for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_autopipe.core import ClusterTopology, ConfigurationError, DeviceMapping, ModelProfile, Partition
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.placements import Grid, launcher_placement, with_rank_0_last
from lightning_autopipe.planner.replica_counts import choose_replica_counts
from lightning_autopipe.planner.search import search
from lightning_autopipe.planner.search_space import SearchSpace
from lightning_autopipe.planner.unequal import unequal_step_work

from . import dapple, pipedream, piper
from .even import EVEN
from .known import Cuts, known
from .scored import Scored, counts_text, score

MICROBATCHES_PER_DEVICE = 4
"""Of a step: four a stage and replica, whatever the layout."""
HALF_COSTS = 0.6
"""What half a micro-batch is assumed to take of a whole one, where sizes are free: the files have one size each."""
COUNTS_EFFORT = 60_000
_SAME = 1 + 1e-9


class Case:
    """Plans for one model on one cluster.

    Args:
        profile: of the model.
        topology: the cluster; all of its devices are to be used.
    """

    def __init__(self, profile: ModelProfile, topology: ClusterTopology) -> None:
        self.profile, self.topology = profile, topology
        self.cost, self.network = CostModel(profile), LinkNetwork(topology)
        self.num_devices = topology.world_size
        self.num_microbatches = MICROBATCHES_PER_DEVICE * self.num_devices
        self._known = known(self.cost, self.network)
        self._mapped: dict[int, tuple[MappingChoice, float]] = {}

    def layouts(self) -> list[int]:
        """Numbers of stages that leave all stages equally many replicas and at least a layer."""
        return [
            number
            for number in range(1, self.num_devices + 1)
            if self.num_devices % number == 0 and number <= self.profile.num_layers
        ]

    # Equal replica counts, 1F1B -----------------------------------------------

    def setting(self, num_stages: int) -> MappingSetting:
        """Equally many replicas of each stage, with equally many micro-batches."""
        return MappingSetting(
            cost=self.cost,
            network=self.network,
            num_stages=num_stages,
            num_replicas=self.num_devices // num_stages,
            num_microbatches=self.num_microbatches,
            equal_shares=True,
        )

    def ours(self, num_stages: int) -> Scored | None:
        """Our plan of a layout; None where nothing fits."""
        if num_stages not in self._mapped:
            begin = time.process_time()
            try:
                choice = choose_mapping(self.setting(num_stages))
            except ConfigurationError:
                return None
            self._mapped[num_stages] = choice, time.process_time() - begin
        choice, search_s = self._mapped[num_stages]
        work = Objective(choice.setting).step_work(choice.partition.cut_points, choice.depths)
        return score("ours", work, self.topology, plan=self._equal_text(num_stages), search_s=search_s)

    def peers(self, num_stages: int) -> Iterator[Scored]:
        """The peers' plans of a layout; devices are in the order of ranks where they have no say."""
        launcher = launcher_placement(num_stages, self.num_devices // num_stages)
        for name, cuts_of in EVEN.items():
            begin = time.process_time()
            cuts = cuts_of(self._known, num_stages)
            yield self._scored_equal(name, launcher, cuts, time.process_time() - begin)
        sizes = {"num_devices": self.num_devices, "num_replicas": self.num_devices // num_stages}
        begin = time.process_time()
        plan = pipedream.plan(self._known, **sizes)
        yield self._scored_equal("PipeDream", launcher, plan.cuts, time.process_time() - begin)
        begin = time.process_time()
        found = piper.plan(self._known, num_microbatches=self.num_microbatches, **sizes)
        if found is not None:
            yield self._scored_equal("Piper", launcher, found.cuts, time.process_time() - begin)
        begin = time.process_time()
        planner = dapple.DapplePlanner(self._known, self.network, self.num_microbatches)
        plans = list(planner.equal_plans(num_stages, self.num_devices // num_stages))
        search_s = time.process_time() - begin
        least = min(plan.objective for plan in plans)
        # Of those that are the same to DAPPLE, the one that is best here.
        yield _shortest(
            self._scored_equal(
                "DAPPLE", with_rank_0_last(tuple(zip(*plan.stage_ranks, strict=True))), plan.cuts, search_s
            )
            for plan in plans
            if plan.objective <= least * _SAME
        )

    def _scored_equal(self, planner: str, grid: Grid, cuts: Cuts, search_s: float) -> Scored:
        num_replicas = len(grid)
        setting = self.setting(len(grid[0])).pipelines(grid, (self.num_microbatches // num_replicas,) * num_replicas)
        work = Objective(setting).step_work(cuts, self.setting(len(grid[0])).depths)
        return score(planner, work, self.topology, plan=self._equal_text(len(grid[0])), search_s=search_s)

    def _equal_text(self, num_stages: int) -> str:
        return counts_text((self.num_devices // num_stages,) * num_stages)

    # Any replica counts ----------------------------------------------------------

    def unrestricted_peers(self) -> Iterator[Scored]:
        """Plans of the peers that choose the number of stages and the devices of each."""
        begin = time.process_time()
        plan = pipedream.plan(self._known, num_devices=self.num_devices)
        yield self._scored("PipeDream", plan.cuts, self._in_order(plan.counts), time.process_time() - begin)
        begin = time.process_time()
        found = piper.plan(self._known, num_devices=self.num_devices, num_microbatches=self.num_microbatches)
        if found is not None:
            yield self._scored("Piper", found.cuts, self._in_order(found.counts), time.process_time() - begin)
        begin = time.process_time()
        placed = dapple.DapplePlanner(self._known, self.network, self.num_microbatches).plan()
        yield self._scored("DAPPLE", placed.cuts, placed.stage_ranks, time.process_time() - begin)

    def ours_unrestricted(self) -> Scored | None:
        """Our best plan with any counts, begun from our own plans of all layouts; None where nothing fits."""
        layouts = [number for number in self.layouts() if self.ours(number) is not None]
        begin = time.process_time()
        try:
            choice = choose_replica_counts(
                self.cost,
                self.network,
                num_microbatches=self.num_microbatches,
                equal=[self._mapped[number][0] for number in layouts],
                effort=COUNTS_EFFORT,
            )
        except ConfigurationError:
            return None
        search_s = time.process_time() - begin + sum(self._mapped[number][1] for number in layouts)
        text = counts_text(choice.counts)
        return score("ours", choice.step_work, self.topology, plan=text, search_s=search_s)

    def _scored(self, planner: str, cuts: Cuts, stage_ranks: Sequence[Sequence[int]], search_s: float) -> Scored:
        mapping = DeviceMapping(stage_ranks=_with_rank_0_last(stage_ranks))
        work = unequal_step_work(
            self.cost,
            Partition(cut_points=cuts, num_layers=self.profile.num_layers),
            mapping,
            network=self.network,
            num_microbatches=self.num_microbatches,
        )
        return score(planner, work, self.topology, plan=counts_text(map(len, stage_ranks)), search_s=search_s)

    def _in_order(self, counts: Sequence[int]) -> list[list[int]]:
        """Ranks in order, from the last stage to the first."""
        ranks = iter(range(self.num_devices))
        return [[next(ranks) for _ in range(count)] for count in reversed(counts)][::-1]

    # Depths, sizes and slices ---------------------------------------------------------

    def ours_searched(self, num_stages: int, *, has_halves: bool) -> Scored | None:
        """Our best schedule of a layout: depths, and with halves also sizes and slices; None where nothing fits."""
        times = self.profile.times[0]
        size = times.microbatch_size
        half = replace(
            times,
            microbatch_size=size / 2,
            forward_s=tuple(HALF_COSTS * seconds for seconds in times.forward_s),
            backward_s=tuple(HALF_COSTS * seconds for seconds in times.backward_s),
        )
        profile = replace(self.profile, times=(times, half)) if has_halves else self.profile
        begin = time.process_time()
        try:
            best = search(
                SearchSpace(
                    memory_share=1.0,  # as for all others
                    cost=CostModel(profile),
                    network=self.network,
                    batch_size=self.num_microbatches * size,
                    batch_of="step",
                    num_stages=num_stages,
                    min_samples=size / 2,
                    kinds=("sliced_1f1b",) if has_halves else (),
                )
            ).best
        except ConfigurationError:
            return None
        sliced = ", sliced" if best.schedule.is_sliced else ""
        text = f"{counts_text(best.replica_counts)}, {best.num_microbatches} of {best.microbatch_size:g}{sliced}"
        return score("ours", best.work, self.topology, plan=text, search_s=time.process_time() - begin)


def _with_rank_0_last(stage_ranks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank 0 changes places with the first one of the last stage."""
    first = stage_ranks[-1][0]
    places = {0: first, first: 0}
    return tuple(tuple(places.get(rank, rank) for rank in ranks) for ranks in stage_ranks)


def _shortest(plans: Iterator[Scored]) -> Scored:
    return min(plans, key=lambda plan: (not plan.fits, plan.step_s))
