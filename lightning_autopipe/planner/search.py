"""Chooses everything together: stages, replicas, micro-batches, devices, cuts, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.depths import choose_partition_and_depths
from lightning_autopipe.planner.mapper import EFFORT_PER_DEVICE, PARTITION_EFFORT, choose_mapping
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.microbatches import microbatch_counts
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.replica import Depths
from lightning_autopipe.planner.schedule_choice import OTHER_KINDS, ScheduleChoice, choose_schedule
from lightning_autopipe.planner.scheduled_work import scheduled_work
from lightning_autopipe.planner.search_space import SearchSpace
from lightning_autopipe.planner.unlike_counts import unlike_count_candidates
from lightning_autopipe.schedules.gpipe import NAME as GPIPE
from lightning_autopipe.schedules.one_f_one_b import NAME as ONE_F_ONE_B
from lightning_autopipe.schedules.one_f_one_b import default_depths

_DEEPER_PAYS = 0.99
"""Deeper warm-ups and other schedules are planned where they shorten the step to this share at least: they keep more,
and what is predicted is not that exact."""
_FEWER_MICROBATCHES = 0.99
"""Of two numbers of micro-batches the smaller one is taken where it reaches this share of the other's speed."""
_NUM_FINALISTS = 3
_COARSE = 1 / 16
"""Effort for candidates that are only compared, against that for finalists."""
_DEPTHS_EFFORT = 400_000
_MAX_SIMULATED_ACTIONS = 20_000
"""Actions of a step up to which schedules beside 1F1B are looked at: each is simulated some dozens of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was found."""

    best: Candidate
    runners_up: tuple[Candidate, ...]
    """One of each other layout and number of micro-batches that was looked at, the best one first."""
    num_pruned: int
    """Layouts with numbers of micro-batches that could not be better by their bound."""


def search(space: SearchSpace) -> SearchResult:
    """The choice with the most predicted samples per second.

    Layouts with their numbers of micro-batches are gone through in the order of what they promise by a bound, as long
    as one can be better than the best one found, and a few in any case, to be told. Each is mapped and cut with little
    effort; the best few are searched again with all of it, and with deeper warm-ups and other schedules. Of numbers of
    micro-batches that are about as good, the smallest one is taken. Unlike numbers of replicas for stages, where they
    may be, compete with the best of these.

    Raises:
        ConfigurationError: nothing was found that fits the devices' memory, or no times are known for any size that a
            micro-batch can have.
    """
    return _Search(space).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A layout with a number of micro-batches."""

    setting: MappingSetting
    num_microbatches: int
    """Of each replica, on average."""
    num_samples: float
    promise: float
    """Samples per second that it cannot be above."""


class _Search:
    def __init__(self, space: SearchSpace) -> None:
        self._space, self._network = space, space.planned_network()
        self._grids: dict[tuple[int, int], DeviceMapping] = {}
        self._failure: ConfigurationError | None = None

    def run(self) -> SearchResult:
        entries = sorted(self._entries(), key=lambda entry: -entry.promise)
        found: list[tuple[Candidate, _Entry]] = []
        num_pruned = 0
        for position, entry in enumerate(entries):
            fastest = max((candidate.samples_per_s for candidate, _ in found), default=0.0)
            if entry.promise <= fastest and len(found) >= _NUM_FINALISTS:
                num_pruned = len(entries) - position
                break
            candidate = self._coarse(entry)
            if candidate is not None:
                found.append((candidate, entry))
        found.sort(key=lambda pair: -pair[0].samples_per_s)
        found = [*self._finalists(found), *found[_NUM_FINALISTS:]]
        found.sort(key=lambda pair: -pair[0].samples_per_s)
        candidates = [candidate for candidate, _ in found]
        preferred = [_with_fewest_microbatches(found)[0]] if found else []
        if not self._space.equal_counts:
            unlike = unlike_count_candidates(self._space, self._network)
            candidates, preferred = [*candidates, *unlike], [*preferred, *unlike]
        if not preferred:
            raise self._failure or self._no_size()
        best = max(preferred, key=lambda candidate: candidate.samples_per_s)
        others = sorted((one for one in candidates if one is not best), key=lambda one: -one.samples_per_s)
        return SearchResult(best=best, runners_up=tuple(others), num_pruned=num_pruned)

    # What there is to look at -----------------------------------------------

    def _entries(self) -> Iterator[_Entry]:
        space = self._space
        smallest, largest = space.cost.known_sizes
        for num_stages, num_replicas in space.layouts():
            batch_size = space.batch_size / (num_replicas if space.batch_of == "step" else 1)
            counts = microbatch_counts(
                space.cost,
                batch_size=batch_size,
                num_stages=num_stages,
                min_samples=space.min_samples,
                num_wanted=None if space.num_microbatches == "auto" else space.num_microbatches,
            )
            for number in counts:
                setting = MappingSetting(
                    cost=space.cost,
                    network=self._network,
                    num_stages=num_stages,
                    num_replicas=num_replicas,
                    num_microbatches=number * num_replicas,
                    equal_shares=space.equal_shares,
                    depths=(number - 1,) * num_stages if space.schedule == GPIPE else default_depths(num_stages),
                    microbatch_size=min(max(batch_size / number, smallest), largest),
                    exchange_s=space.exchange_s,
                    optimizer_state_ratio=space.optimizer_state_ratio,
                    optimizer_shares=space.optimizer_shares(num_replicas),
                    cuts=space.cuts_of(num_stages),
                )
                num_samples = batch_size * num_replicas
                bound_s = MappingPrices(setting).lower_bound_s()
                yield _Entry(
                    setting=setting,
                    num_microbatches=number,
                    num_samples=num_samples,
                    promise=num_samples / bound_s if bound_s else math.inf,
                )

    def _no_size(self) -> ConfigurationError:
        smallest, largest = self._space.cost.known_sizes
        return ConfigurationError(
            f"no times are known for micro-batches of a batch of {self._space.batch_size:g} samples "
            f"(num_microbatches={self._space.num_microbatches}): measured are {smallest:g} to {largest:g}; profile "
            "other sizes, or set num_microbatches so that micro-batches are as large as measured"
        )

    # Looking ----------------------------------------------------------------

    def _coarse(self, entry: _Entry) -> Candidate | None:
        """A candidate that shows about what an entry is worth; None where nothing fits."""
        setting = entry.setting
        layout = (setting.num_stages, setting.num_replicas)
        try:
            if layout not in self._grids:
                self._grids[layout] = self._mapped(setting, _COARSE).mapping
            mapping = self._grids[layout]
            return self._scheduled(entry, mapping, setting.pipelines(*_grid_and_shares(setting, mapping)), _COARSE)
        except ConfigurationError as error:
            self._failure = self._failure or error
            return None

    def _finalists(self, found: Sequence[tuple[Candidate, _Entry]]) -> list[tuple[Candidate, _Entry]]:
        """The best few, searched again with all effort; the coarse one stays where it was better."""
        finalists = []
        for coarse, entry in found[:_NUM_FINALISTS]:
            best = coarse
            try:
                mapped = self._mapped(entry.setting, 1.0)
                # What the place of rank 0 costs is about the same for a mapping that was found sooner.
                best = replace(coarse, rank_0_costs=mapped.rank_0_costs)
                candidate = self._scheduled(entry, mapped.mapping, mapped.setting, 1.0, mapped.rank_0_costs)
                best = max(candidate, best, key=lambda one: one.samples_per_s)
            except ConfigurationError:  # the coarse one fits, with other depths
                pass
            finalists.append((best, entry))
        return finalists

    def _mapped(self, setting: MappingSetting, share: float) -> MappingChoice:
        effort = int(share * EFFORT_PER_DEVICE * setting.topology.world_size)
        try:
            return choose_mapping(setting, effort=effort, partition_effort=int(share * PARTITION_EFFORT))
        except ConfigurationError:
            if self._space.schedule != "auto" or not any(setting.depths):
                raise
            # Shallower warm-ups keep less.
            return choose_mapping(
                replace(setting, depths=(0,) * setting.num_stages),
                effort=effort,
                partition_effort=int(share * PARTITION_EFFORT),
            )

    def _scheduled(
        self, entry: _Entry, mapping: DeviceMapping, setting: PipelineSetting, share: float, rank_0_costs: float = 0.0
    ) -> Candidate:
        """The best schedule, and cuts, for a mapping."""
        space = self._space
        plain_depths: Depths = entry.setting.depths
        effort = int(share * _DEPTHS_EFFORT)
        plain_s, choice = math.inf, None
        try:
            choice = choose_partition(setting, depths=plain_depths, effort=effort)
            plain_s = choice.step_s
        except ConfigurationError:
            if space.schedule != "auto" or setting.num_stages == 1:
                raise
        schedule = ScheduleSpec(name=GPIPE if space.schedule == GPIPE else ONE_F_ONE_B)
        if space.schedule == "auto" and setting.num_stages > 1:
            deeper = choose_partition_and_depths(setting, effort=effort)
            if choice is None or deeper.step_s < _DEEPER_PAYS * choice.step_s:
                choice, schedule = deeper, ScheduleSpec(name=ONE_F_ONE_B, depths=deeper.depths)
        assert choice is not None
        best = ScheduleChoice(schedule=schedule, cuts=choice.partition.cut_points, step_s=choice.step_s)
        if setting.num_stages > 1 and (space.schedule in OTHER_KINDS or self._is_worth_it(setting, share)):
            kinds = space.kinds if space.schedule == "auto" else (space.schedule,)
            other = choose_schedule(setting, best.cuts, choice.depths, kinds=kinds)
            if space.schedule in OTHER_KINDS:
                if other is None:
                    raise self._no_schedule()
                best = other
            elif other is not None and other.step_s < _DEEPER_PAYS * best.step_s:
                best = other
        shares = setting.num_microbatches
        return Candidate(
            mapping=mapping,
            partition=Partition(cut_points=best.cuts, num_layers=space.cost.num_layers),
            schedule=best.schedule,
            num_microbatches=entry.num_microbatches,
            replica_microbatches=shares if len(set(shares)) > 1 else (),
            microbatch_size=setting.microbatch_size or space.cost.microbatch_size,
            num_samples=entry.num_samples,
            work=scheduled_work(setting, best.cuts, best.schedule),
            step_s=best.step_s,
            plain_step_s=plain_s if math.isfinite(plain_s) else best.step_s,
            rank_0_costs=rank_0_costs,
        )

    def _is_worth_it(self, setting: PipelineSetting, share: float) -> bool:
        """Whether other schedules are looked at beside 1F1B: for finalists, where a step is soon simulated."""
        num_actions = 2 * setting.num_stages * sum(setting.num_microbatches)
        return self._space.schedule == "auto" and share == 1.0 and num_actions <= _MAX_SIMULATED_ACTIONS

    def _no_schedule(self) -> ConfigurationError:
        return ConfigurationError(
            f"schedule={self._space.schedule!r} cannot be planned: slices need times of half a micro-batch, "
            "zero-bubble those of weight gradients apart, and several stages a rank at least two layers for each rank, "
            "free cuts and enough memory; profile smaller sizes, or set another schedule"
        )


def _grid_and_shares(
    setting: MappingSetting, mapping: DeviceMapping
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Devices by replica, and the micro-batches of each for even cuts."""
    grid = tuple(zip(*mapping.stage_ranks, strict=True))
    prices = MappingPrices(setting)
    even = prices.even_shares()
    return grid, prices.shares(grid, prices.cuts(grid, even))


def _with_fewest_microbatches(found: Sequence[tuple[Candidate, _Entry]]) -> tuple[Candidate, _Entry]:
    """The best one, or one of the same layout that is about as good with fewer micro-batches."""
    best, entry = found[0]
    near = [
        (candidate, other)
        for candidate, other in found
        if candidate.replica_counts == best.replica_counts
        and candidate.samples_per_s >= _FEWER_MICROBATCHES * best.samples_per_s
    ]
    return min(near, key=lambda pair: pair[1].num_microbatches, default=(best, entry))
