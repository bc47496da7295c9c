"""How many ranks each stage gets, where stages may have unlike numbers of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, islice, permutations, product, zip_longest
from typing import Literal, NamedTuple

from lightning_autopipe.core.cluster import ClusterTopology, Device
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.count_table import Counts, CountTable
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.placements import server_orders
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.symmetry import twin_classes
from lightning_autopipe.planner.unequal import Windows, default_windows, unequal_step_work
from lightning_autopipe.planner.workload import StepWork

EFFORT = 150_000
"""Forwards and backwards that a search may simulate."""
_MOST_STAGES = 8
"""Numbers of stages that ``"auto"`` tries with unlike counts."""
_NUM_CANDIDATES = 16
"""Choices with the shortest busy stages that are simulated."""
_NUM_STARTS = 4
"""Choices that are improved on."""
_SHORTER = 1 - 1e-9
"""A step is shorter by more than what sums are rounded by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCountChoice:
    """Layers and ranks of each stage, and what they are worth."""

    partition: Partition
    mapping: DeviceMapping
    windows: Windows
    """By stage, how many micro-batches a forward may be ahead; see `windowed_lists`."""
    step_work: StepWork
    """The step for `simulate`, with the micro-batches dealt."""
    step_s: float
    """Seconds of a step, simulated."""
    equal_step_s: float
    """Of the best choice with equal counts."""
    num_simulated: int
    """Choices that were simulated."""

    @property
    def counts(self) -> Counts:
        """Ranks of each stage."""
        return tuple(len(ranks) for ranks in self.mapping.stage_ranks)


def alike_devices(num_devices: int, *, memory_bytes: int = 1 << 60) -> LinkNetwork:
    """Devices like the profiled one, between which whatever is sent is there at once."""
    devices = (
        Device(global_rank=rank, server="server", model="the profiled one", memory_bytes=memory_bytes)
        for rank in range(num_devices)
    )
    return LinkNetwork(ClusterTopology(devices=tuple(devices)))


def choose_replica_counts(
    cost: CostModel,
    network: LinkNetwork,
    *,
    num_microbatches: int,
    num_stages: int | Literal["auto"] = "auto",
    equal: Iterable[MappingChoice] | None = None,
    microbatch_size: float | None = None,
    exchange_s: float = 0.0,
    optimizer_state_ratio: float = 2.0,
    effort: int = EFFORT,
) -> ReplicaCountChoice:
    """The partition, counts and devices with the shortest simulated step; never longer than with equal counts.

    Candidates come from `CountTable`, for several orders of the devices, and from the mapper, with equal counts. All
    are simulated; from the best ones cuts and devices are moved between stages, and windows widened, while that helps.

    Args:
        cost: of the layers.
        network: devices and links; `alike_devices` where nothing is known of them.
        num_microbatches: of a step, over all ranks of a stage together.
        num_stages: a number, or ``"auto"``.
        equal: mappings with equal counts that are known already, for as many micro-batches; None: they are searched.
        microbatch_size: samples; None: as profiled.
        exchange_s: what all ranks take to agree on one number at the step's end.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.
        effort: forwards and backwards that may be simulated, beyond those of the first candidates.

    Raises:
        ConfigurationError: there are more stages than layers or devices, or nothing was found that fits the memory.
    """
    search = _Search(cost, network, num_microbatches, microbatch_size, exchange_s, optimizer_state_ratio)
    num_devices = network.topology.world_size
    most = min(cost.num_layers, num_devices)
    if num_stages == "auto":
        equal_numbers = [number for number in range(1, most + 1) if num_devices % number == 0]
        numbers: Sequence[int] = range(1, min(most, _MOST_STAGES) + 1)
    elif 1 <= num_stages <= most:
        equal_numbers = numbers = [num_stages]
    else:
        raise ConfigurationError(
            f"num_stages={num_stages} for {cost.num_layers} layers and {num_devices} devices: each stage has at least "
            f'one of both; set 1 to {most}, or "auto"'
        )
    mappings = search.equal(equal_numbers) if equal is None else list(equal)
    starts = [_Choice(one.partition.cut_points, one.mapping.stage_ranks, ()) for one in mappings]
    best_equal = min(mappings, key=lambda one: one.step_s, default=None)
    found = search.improved([*starts, *search.from_tables(numbers)], effort)
    equal_step_s = best_equal.step_s if best_equal else math.inf
    if best_equal is not None and not search.step_s(found) < equal_step_s * _SHORTER:
        return ReplicaCountChoice(
            partition=best_equal.partition,
            mapping=best_equal.mapping,
            windows=default_windows([len(ranks) for ranks in best_equal.mapping.stage_ranks]),
            step_work=Objective(best_equal.setting).step_work(best_equal.partition.cut_points, best_equal.depths),
            step_s=equal_step_s,
            equal_step_s=equal_step_s,
            num_simulated=search.num_simulated,
        )
    return ReplicaCountChoice(
        partition=Partition(cut_points=found.cuts, num_layers=cost.num_layers),
        mapping=DeviceMapping(stage_ranks=found.stage_ranks),
        windows=found.windows or default_windows(found.counts),
        step_work=search.step_work(found),
        step_s=search.step_s(found),
        equal_step_s=equal_step_s,
        num_simulated=search.num_simulated,
    )


class _Choice(NamedTuple):
    cuts: Cuts
    stage_ranks: tuple[tuple[int, ...], ...]
    windows: Windows
    """Empty: `default_windows`."""

    @property
    def counts(self) -> Counts:
        return tuple(map(len, self.stage_ranks))


class _Search:
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
        self._steps: dict[_Choice, float] = {}

    @property
    def num_simulated(self) -> int:
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

    def from_tables(self, numbers: Iterable[int]) -> list[_Choice]:
        """Choices with the shortest busy stages, the shortest one first."""
        found = []
        for order in self._orders():
            table = self._table.of(order)
            for number in numbers:
                best = table.best(number)
                if best is not None:
                    cuts, counts, seconds = best
                    found.append((seconds, _Choice(cuts, _dealt(order, counts), ())))
        return [choice for _, choice in sorted(found)[:_NUM_CANDIDATES]]

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

    def step_work(self, choice: _Choice) -> StepWork:
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

    def step_s(self, choice: _Choice) -> float:
        """Seconds of a step; infinite where it does not fit the memory."""
        if choice not in self._steps:
            timeline = simulate(self.step_work(choice))
            devices = self._network.topology.devices
            fits = all(
                timeline.peak_bytes[rank] <= devices[rank].memory_bytes for of in choice.stage_ranks for rank in of
            )
            self._steps[choice] = timeline.step_s if fits else math.inf
        return self._steps[choice]

    def improved(self, starts: Sequence[_Choice], effort: int) -> _Choice:
        """The best that moves of cuts, devices and windows make of some choices."""
        if not starts:
            raise ConfigurationError("nothing was found that fits the devices' memory; set more stages (num_stages)")
        best = sorted(dict.fromkeys(starts), key=self.step_s)[:_NUM_STARTS]
        improved = []
        for choice in best:
            left = effort // len(best)
            is_better = True
            while is_better and left > 0:
                is_better = False
                for moved in self._moves(choice):
                    left -= 2 * len(moved.counts) * self._num_microbatches if moved not in self._steps else 0
                    if self.step_s(moved) < self.step_s(choice) * _SHORTER:
                        choice, is_better = moved, True
                        break
                    if left <= 0:
                        break
            improved.append(choice)
        return min(improved, key=self.step_s)

    def _moves(self, choice: _Choice) -> Iterator[_Choice]:
        cuts, stage_ranks, windows = choice
        edges = (0, *cuts, self._cost.num_layers)
        for index, (before, cut, after) in enumerate(zip(edges, cuts, edges[2:], strict=False)):
            for moved in (cut - 1, cut + 1):
                if before < moved < after:
                    yield choice._replace(cuts=(*cuts[:index], moved, *cuts[index + 1 :]))
        for giver, taker in permutations(range(len(stage_ranks)), 2):
            if len(stage_ranks[giver]) > 1 and len(stage_ranks[taker]) < self._num_microbatches:
                ranks = [list(of) for of in stage_ranks]
                ranks[taker].append(ranks[giver].pop())
                yield from self._recut(ranks)
        for a, b in combinations(range(len(stage_ranks)), 2):
            for i, j in product(range(len(stage_ranks[a])), range(len(stage_ranks[b]))):
                x, y = stage_ranks[a][i], stage_ranks[b][j]
                if self._classes[x] != self._classes[y] and 0 not in (x, y):
                    ranks = [list(of) for of in stage_ranks]
                    ranks[a][i], ranks[b][j] = y, x
                    yield from self._recut(ranks)
        windows = windows or default_windows(choice.counts)
        for stage_index in range(len(windows)):
            wider = [window + count for window, count in zip(windows, choice.counts, strict=True)][: stage_index + 1]
            yield choice._replace(
                windows=tuple(accumulate([*reversed(windows[stage_index + 1 :]), *reversed(wider)], max))[::-1]
            )

    def _recut(self, ranks: Sequence[Sequence[int]]) -> Iterator[_Choice]:
        """The choice with these ranks, and the cuts that suit them."""
        found = self._table.of([rank for of in reversed(ranks) for rank in of]).best_cuts(tuple(map(len, ranks)))
        if found is not None:
            yield _Choice(found[0], tuple(map(tuple, ranks)), ())


def _dealt(order: Sequence[int], counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Devices of a row for stages, the last one first."""
    row = iter(order)
    return tuple(tuple(islice(row, count)) for count in reversed(counts))[::-1]
