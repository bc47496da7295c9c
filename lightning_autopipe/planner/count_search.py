"""Searches layers and ranks of stages that may have unlike numbers of ranks, by simulation."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, combinations, islice, permutations, product, zip_longest
from typing import NamedTuple

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.count_table import Counts, CountTable
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.placements import server_orders
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.symmetry import twin_classes
from lightning_autopipe.planner.unequal import Windows, default_windows, unequal_step_work
from lightning_autopipe.planner.workload import StepWork

_NUM_CANDIDATES = 16
"""Counts with the shortest busy stages that are simulated, for each number of stages."""
_MOST_PAIRED = 64
"""Devices up to which all counts of two stages are looked at: steps with few micro-batches are far from the table's."""
_NUM_STARTS = 4
"""Choices that are improved on, besides as many of other numbers of stages."""
_NUM_KICKS = 8
"""Random exchanges from which the search goes on when no move helps any more."""
_MOST_EXCHANGES = 200
"""That one of them is drawn from."""
SHORTER = 1 - 1e-9
"""A step is shorter by more than what sums are rounded by."""


class CountedStages(NamedTuple):
    """Layers and ranks of each stage."""

    cuts: Cuts
    stage_ranks: tuple[tuple[int, ...], ...]
    windows: Windows
    """Empty: `default_windows`."""

    @property
    def counts(self) -> Counts:
        """Ranks of each stage."""
        return tuple(map(len, self.stage_ranks))


class CountSearch:
    """Candidates for one setting, and what moves make of them; see `choose_replica_counts` for the arguments."""

    def __init__(
        self,
        cost: CostModel,
        network: LinkNetwork,
        num_microbatches: int,
        microbatch_size: float | None,
        exchange_s: float,
        optimizer_state_ratio: float,
    ) -> None:
        self._cost, self._network, self._num_microbatches = cost, network, num_microbatches
        self._size, self._exchange_s, self._state_ratio = microbatch_size, exchange_s, optimizer_state_ratio
        self._classes = twin_classes(network)
        self._table = CountTable(
            cost,
            network,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            optimizer_state_ratio=optimizer_state_ratio,
        )
        self._steps: dict[CountedStages, float] = {}

    @property
    def num_simulated(self) -> int:
        """Choices that were simulated."""
        return len(self._steps)

    def equal(self, numbers: Iterable[int]) -> list[MappingChoice]:
        """The best mappings with equal counts, for some numbers of stages; those that fit."""
        found = []
        for number in numbers:
            setting = MappingSetting(
                cost=self._cost,
                network=self._network,
                num_stages=number,
                num_replicas=min(self._network.topology.world_size // number, self._num_microbatches),
                num_microbatches=self._num_microbatches,
                microbatch_size=self._size,
                exchange_s=self._exchange_s,
                optimizer_state_ratio=self._state_ratio,
            )
            with contextlib.suppress(ConfigurationError):  # it does not fit the memory
                found.append(choose_mapping(setting))
        return found

    def from_tables(self, numbers: Iterable[int]) -> list[CountedStages]:
        """Choices with the shortest busy stages, the shortest one first."""
        tables = [(order, self._table.of(order)) for order in self._orders()]
        found: list[tuple[float, CountedStages]] = []
        for number in numbers:
            by_counts: dict[Counts, tuple[float, CountedStages]] = {}
            for order, table in tables:
                bests = [table.best(number), *(table.best_cuts(counts) for counts in self._pairs_of_counts(number))]
                for cuts, counts, seconds in filter(None, bests):
                    one = seconds, CountedStages(cuts, _dealt(order, counts), ())
                    by_counts[counts] = min(one, by_counts.get(counts, one))
            found += sorted(by_counts.values())[:_NUM_CANDIDATES]
        return [choice for _, choice in sorted(found)]

    def _pairs_of_counts(self, num_stages: int) -> list[Counts]:
        """All counts of two stages that use all devices, as far as there are micro-batches for them."""
        num_devices = self._network.topology.world_size
        if num_stages != 2 or num_devices > _MOST_PAIRED:
            return []
        pairs = [(first, num_devices - first) for first in range(1, num_devices)]
        return [pair for pair in pairs if max(pair) <= self._num_microbatches]

    def _orders(self) -> list[tuple[int, ...]]:
        """Orders of all devices that begin with rank 0; of those that differ by twins only, one."""
        found: dict[object, tuple[int, ...]] = {}
        for servers in server_orders(self._network.topology).values():
            own_first = sorted(servers, key=lambda ranks: 0 not in ranks)
            scattered = [rank for turn in zip_longest(*servers) for rank in turn if rank is not None]
            for order in (chain(*own_first), chain(*servers), scattered):
                ranks = tuple(sorted(order, key=bool))  # rank 0 first, the others as they are
                found.setdefault(tuple(self._classes[rank] for rank in ranks), ranks)
        return list(found.values())

    def step_work(self, choice: CountedStages) -> StepWork:
        """The step of a choice, for `simulate`."""
        return unequal_step_work(
            self._cost,
            Partition(cut_points=choice.cuts, num_layers=self._cost.num_layers),
            DeviceMapping(stage_ranks=choice.stage_ranks),
            network=self._network,
            num_microbatches=self._num_microbatches,
            microbatch_size=self._size,
            windows=choice.windows or None,
            exchange_s=self._exchange_s,
            optimizer_state_ratio=self._state_ratio,
        )

    def step_s(self, choice: CountedStages) -> float:
        """Seconds of a step; infinite where it does not fit the memory."""
        if choice not in self._steps:
            timeline = simulate(self.step_work(choice))
            devices = self._network.topology.devices
            fits = all(
                timeline.peak_bytes[rank] <= devices[rank].memory_bytes for of in choice.stage_ranks for rank in of
            )
            self._steps[choice] = timeline.step_s if fits else math.inf
        return self._steps[choice]

    def improved(self, starts: Sequence[CountedStages], effort: int) -> CountedStages:
        """The best that moves of cuts, devices and windows make of some choices."""
        if not starts:
            raise ConfigurationError("nothing was found that fits the devices' memory; set more stages (num_stages)")
        ranked = sorted(dict.fromkeys(starts), key=self.step_s)
        by_stages = {len(choice.counts): choice for choice in reversed(ranked)}
        best = sorted({*ranked[:_NUM_STARTS], *by_stages.values()}, key=self.step_s)[: 2 * _NUM_STARTS]
        found = min((self._descended(choice, effort // (2 * len(best))) for choice in best), key=self.step_s)
        chance = random.Random(0)
        for _ in range(_NUM_KICKS):
            others = list(islice(self._exchanges(found), _MOST_EXCHANGES))
            if not others:
                break
            kicked = self._descended(chance.choice(others), effort // (2 * _NUM_KICKS))
            found = min(found, kicked, key=self.step_s)
        if math.isinf(self.step_s(found)):
            raise ConfigurationError("nothing was found that fits the devices' memory; set more stages (num_stages)")
        return found

    def _descended(self, choice: CountedStages, effort: int) -> CountedStages:
        """What moves lead to that each shorten the step."""
        left, is_better = effort, True
        while is_better and left > 0:
            is_better = False
            for moved in chain(self._shifts(choice), self._exchanges(choice), self._widened(choice)):
                left -= 2 * len(moved.counts) * self._num_microbatches if moved not in self._steps else 0
                if self.step_s(moved) < self.step_s(choice) * SHORTER:
                    choice, is_better = moved, True
                    break
                if left <= 0:
                    break
        return choice

    def _shifts(self, choice: CountedStages) -> Iterator[CountedStages]:
        """A cut moved by a layer."""
        cuts = choice.cuts
        edges = (0, *cuts, self._cost.num_layers)
        for index, (before, cut, after) in enumerate(zip(edges, cuts, edges[2:], strict=False)):
            for moved in (cut - 1, cut + 1):
                if before < moved < after:
                    yield choice._replace(cuts=(*cuts[:index], moved, *cuts[index + 1 :]))

    def _exchanges(self, choice: CountedStages) -> Iterator[CountedStages]:
        """A device given to another stage, or exchanged for an unlike one, and the cuts that suit that."""
        stage_ranks, classes = choice.stage_ranks, self._classes
        unlike = [
            {classes[rank]: index for index, rank in enumerate(ranks) if rank != 0}.values() for ranks in stage_ranks
        ]
        for giver, taker in permutations(range(len(stage_ranks)), 2):
            if len(stage_ranks[giver]) > 1 and len(stage_ranks[taker]) < self._num_microbatches:
                for index in unlike[giver]:
                    ranks = [list(of) for of in stage_ranks]
                    ranks[taker].append(ranks[giver].pop(index))
                    yield from self._recut(ranks)
        for a, b in combinations(range(len(stage_ranks)), 2):
            for i, j in product(unlike[a], unlike[b]):
                ranks = [list(of) for of in stage_ranks]
                if classes[ranks[a][i]] != classes[ranks[b][j]]:
                    ranks[a][i], ranks[b][j] = ranks[b][j], ranks[a][i]
                    yield from self._recut(ranks)

    def _widened(self, choice: CountedStages) -> Iterator[CountedStages]:
        """The windows of the first stages wider by a turn; later ones are never wider than those before them."""
        counts = choice.counts
        windows = choice.windows or default_windows(counts)
        for number in range(1, len(windows)):
            wider = [window + count for window, count in zip(windows[:number], counts, strict=False)]
            least = accumulate(reversed((*wider, *windows[number:])), max)
            yield choice._replace(windows=tuple(least)[::-1])

    def _recut(self, ranks: Sequence[Sequence[int]]) -> Iterator[CountedStages]:
        """The choice with these ranks, and the cuts that suit them."""
        found = self._table.of([rank for of in reversed(ranks) for rank in of]).best_cuts(tuple(map(len, ranks)))
        if found is not None:
            yield CountedStages(found[0], tuple(map(tuple, ranks)), ())


def _dealt(order: Sequence[int], counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Devices of a row for stages, the last one first."""
    row = iter(order)
    return tuple(tuple(islice(row, count)) for count in reversed(counts))[::-1]
