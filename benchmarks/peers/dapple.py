"""DAPPLE: the latency of a pipeline around its pivot stage, with devices taken by three policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations

from lightning_autopipe.planner.links import LinkNetwork

from .known import Cuts, Known

POLICIES = ("fresh", "append", "scatter")
MAX_EXACT = 3_000
"""Cuts up to which all are looked at."""
NUM_COARSE = 14
"""Cuts to choose from where numbers of devices are searched, too; they are moved afterwards."""
_LESS = 1 - 1e-12

StageRanks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotStage:
    """A stage, or a crossing between two, which counts as a stage of its own."""

    forward_s: float
    backward_s: float
    allreduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """Cuts, and which devices run each stage."""

    cuts: Cuts
    stage_ranks: StageRanks
    objective: float
    """Seconds of a step, as DAPPLE counts them."""


def pivot(stages: Sequence[PivotStage], num_microbatches: int) -> int:
    """Q: the stage without bubbles in the steady phase; from the last stage on, an earlier one that waits longer."""
    found = len(stages) - 1
    between_s = 0.0  # forwards and backwards of the stages between the one looked at and the pivot
    for index in range(len(stages) - 2, -1, -1):
        if _steady_s(stages[index], num_microbatches) > _steady_s(stages[found], num_microbatches) + between_s:
            found, between_s = index, 0.0
        else:
            between_s += stages[index].forward_s + stages[index].backward_s
    return found


def latency_s(stages: Sequence[PivotStage], num_microbatches: int) -> float:
    """``L = sum of F up to Q + (M - 1) (F_Q + B_Q) + T_end``, with ``T_end`` the largest over stages s of
    ``AR_s + sum of B from s to Q`` before the pivot, and ``AR_s - sum of B from Q to s`` behind it.

    Args:
        stages: with crossings as stages between them.
        num_microbatches: M.

    Source:
        Fan et al., *DAPPLE*, PPoPP 2021.
    """
    q = pivot(stages, num_microbatches)
    backwards = list(accumulate((stage.backward_s for stage in stages), initial=0.0))
    end_s = max(
        stage.allreduce_s + backwards[q + 1] - backwards[index]
        if index <= q
        else stage.allreduce_s - (backwards[index + 1] - backwards[q])
        for index, stage in enumerate(stages)
    )
    return sum(stage.forward_s for stage in stages[: q + 1]) + _steady_s(stages[q], num_microbatches) + end_s


class DapplePlanner:
    """Plans for one model on one cluster.

    Args:
        known: of the layers.
        network: tells which devices share a server, and bandwidths inside and between servers.
        num_microbatches: of a step, over all replicas.
    """

    def __init__(self, known: Known, network: LinkNetwork, num_microbatches: int) -> None:
        self._known, self._num_microbatches = known, num_microbatches
        self._forward, self._backward = known.forward_s.tolist(), known.backward_s.tolist()
        self._params, self._crossing = known.param_bytes.tolist(), known.crossing_bytes.tolist()
        topology = network.topology
        self._servers = [topology.server_ranks(server) for server in topology.servers]
        self._server = {rank: index for index, ranks in enumerate(self._servers) for rank in ranks}
        bandwidths = {
            (a, b): network.route(a, b).bandwidth_bytes_per_s for a, b in permutations(range(topology.world_size), 2)
        }
        self._inside = min(
            (bytes_per_s for (a, b), bytes_per_s in bandwidths.items() if self._server[a] == self._server[b]),
            default=float("inf"),
        )
        self._across = min(
            (bytes_per_s for (a, b), bytes_per_s in bandwidths.items() if self._server[a] != self._server[b]),
            default=float("inf"),
        )

    # What a plan is worth ----------------------------------------------------

    def objective(self, cuts: Cuts, stage_ranks: Sequence[Sequence[int]]) -> float:
        """The latency of a plan; replicas share each micro-batch between them."""
        edges = (0, *cuts, self._known.num_layers)
        stages: list[PivotStage] = []
        for index, (ranks, (start, stop)) in enumerate(zip(stage_ranks, pairwise(edges), strict=True)):
            if index:
                crossing_s = self._crossing_s(start, stage_ranks[index - 1], ranks)
                stages.append(PivotStage(forward_s=crossing_s, backward_s=crossing_s))
            count = len(ranks)
            reduced_bytes = 2 * (count - 1) / count * (self._params[stop] - self._params[start])
            stages.append(
                PivotStage(
                    forward_s=(self._forward[stop] - self._forward[start]) / count,
                    backward_s=(self._backward[stop] - self._backward[start]) / count,
                    allreduce_s=reduced_bytes / self._bandwidth(ranks),
                )
            )
        return latency_s(stages, self._num_microbatches)

    def _crossing_s(self, cut: int, senders: Sequence[int], receivers: Sequence[int]) -> float:
        """All of a micro-batch goes over the network at one bandwidth; inside a server pairs send side by side."""
        bandwidth = self._bandwidth([*senders, *receivers])
        num_side_by_side = min(len(senders), len(receivers)) if bandwidth == self._inside else 1
        return float(self._crossing[cut] / (bandwidth * num_side_by_side))

    def _bandwidth(self, ranks: Sequence[int]) -> float:
        return self._inside if len({self._server[rank] for rank in ranks}) == 1 else self._across

    # Equally many replicas ----------------------------------------------------

    def equal_plans(self, num_stages: int, num_replicas: int) -> Iterator[PlacedPlan]:
        """The best cuts for devices taken by each policy, from the first stage to the last and the other way."""
        seen = set()
        for policy in POLICIES:
            used: tuple[int, ...] = (0,) * len(self._servers)
            groups = []
            for _ in range(num_stages):
                used, ranks = self._taken(used, policy, num_replicas)
                groups.append(ranks)
            for stage_ranks in (tuple(groups), tuple(reversed(groups))):
                if stage_ranks not in seen:
                    seen.add(stage_ranks)
                    yield self._with_best_cuts(stage_ranks)

    def _with_best_cuts(self, stage_ranks: StageRanks) -> PlacedPlan:
        num_layers, num_stages = self._known.num_layers, len(stage_ranks)
        num_choices = 1
        for index in range(1, num_stages):
            num_choices = num_choices * (num_layers - index) // index
        if num_choices <= MAX_EXACT:
            choices = combinations(range(1, num_layers), num_stages - 1)
            objective, cuts = min((self.objective(cuts, stage_ranks), cuts) for cuts in choices)
            return PlacedPlan(cuts=cuts, stage_ranks=stage_ranks, objective=objective)
        starts = {self._even_cuts(num_stages, share) for share in (0.0, 0.5, 1.0)}
        return min((self._moved(cuts, stage_ranks) for cuts in starts), key=lambda plan: plan.objective)

    def _even_cuts(self, num_stages: int, backward_share: float) -> Cuts:
        """About evenly much of forward and backward work on each stage."""
        work = [f + backward_share * b for f, b in zip(self._forward, self._backward, strict=True)]
        cuts = []
        for index in range(1, num_stages):
            lowest, highest = (cuts[-1] if cuts else 0) + 1, self._known.num_layers - (num_stages - index)
            goal = work[-1] * index / num_stages
            cuts.append(min(range(lowest, highest + 1), key=lambda cut: abs(work[cut] - goal)))
        return tuple(cuts)

    def _moved(self, cuts: Cuts, stage_ranks: StageRanks) -> PlacedPlan:
        """Moves runs of neighbouring cuts by a layer as long as that helps."""
        best = self.objective(cuts, stage_ranks)
        is_better = True
        while is_better:
            is_better = False
            for moved in _shifted(cuts, self._known.num_layers):
                objective = self.objective(moved, stage_ranks)
                if objective < best * _LESS:
                    cuts, best, is_better = moved, objective, True
                    break
        return PlacedPlan(cuts=cuts, stage_ranks=stage_ranks, objective=best)

    # Any numbers of replicas ----------------------------------------------------

    def plan(self) -> PlacedPlan:
        """Stages from the first on, each with any number of devices by any policy, and what is left as the last one.

        For each cut and set of used devices the plan is kept that is best if the rest is one stage.
        """
        num_devices = len(self._server)
        everything = tuple(sorted(self._server))
        best = PlacedPlan(cuts=(), stage_ranks=(everything,), objective=self.objective((), (everything,)))
        nothing = (0,) * len(self._servers)
        states: dict[int, dict[tuple[int, ...], PlacedPlan]] = {
            0: {nothing: PlacedPlan(cuts=(), stage_ranks=(), objective=best.objective)}
        }
        cuts = self._coarse_cuts()
        for position, start in enumerate((0, *cuts)):
            for used, before in sorted(states.pop(start, {}).items()):
                for count in range(1, num_devices - sum(used)):
                    for now_used, ranks in sorted({self._taken(used, policy, count) for policy in POLICIES}):
                        rest = self._left(now_used)
                        for cut in cuts[position:]:
                            busy_s = self._busy_s(start, cut, count)
                            if busy_s >= best.objective:
                                break
                            placed = PlacedPlan(
                                cuts=(*before.cuts, cut),
                                stage_ranks=(*before.stage_ranks, ranks, rest),
                                objective=self.objective((*before.cuts, cut), (*before.stage_ranks, ranks, rest)),
                            )
                            if placed.objective < best.objective:
                                best = placed
                            known = states.setdefault(cut, {}).get(now_used)
                            if known is None or placed.objective < known.objective:
                                states[cut][now_used] = PlacedPlan(
                                    cuts=placed.cuts, stage_ranks=placed.stage_ranks[:-1], objective=placed.objective
                                )
        return self._moved(best.cuts, best.stage_ranks)

    def _busy_s(self, start: int, stop: int, count: int) -> float:
        seconds = self._forward[stop] - self._forward[start] + self._backward[stop] - self._backward[start]
        return float((self._num_microbatches - 1) * seconds / count)

    def _coarse_cuts(self) -> list[int]:
        """Where least crosses, once in each of some equal parts of the work."""
        work = self._known.work_s
        found = {}
        for cut in range(1, self._known.num_layers):
            part = min(NUM_COARSE - 1, int(NUM_COARSE * work[cut] / work[-1]))
            if part not in found or self._crossing[cut] < self._crossing[found[part]]:
                found[part] = cut
        return sorted(found.values())

    # Devices ------------------------------------------------------------------

    def _taken(self, used: tuple[int, ...], policy: str, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """So many devices by a policy; gives how many are used of each server then, and their ranks."""
        now, ranks = list(used), []
        turn = 0
        while len(ranks) < count:
            free = [index for index, own in enumerate(self._servers) if now[index] < len(own)]
            if policy == "scatter":  # from all servers in turn
                server = free[turn % len(free)]
                turn += 1
                num_taken = 1
            else:  # from those that are not used yet, or from those that are
                is_first = {index: (now[index] > 0) == (policy == "append") for index in free}
                server = min(free, key=lambda index: (not is_first[index], index))
                num_taken = min(count - len(ranks), len(self._servers[server]) - now[server])
            ranks += self._servers[server][now[server] : now[server] + num_taken]
            now[server] += num_taken
        return tuple(now), tuple(ranks)

    def _left(self, used: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for ranks, number in zip(self._servers, used, strict=True) for rank in ranks[number:])


def _steady_s(stage: PivotStage, num_microbatches: int) -> float:
    return (num_microbatches - 1) * (stage.forward_s + stage.backward_s)


def _shifted(cuts: Cuts, num_layers: int) -> Iterator[Cuts]:
    edges = (0, *cuts, num_layers)
    for length in range(1, len(cuts) + 1):
        for first in range(len(cuts) + 1 - length):
            last = first + length
            if edges[last + 1] - edges[last] > 1:
                yield (*cuts[:first], *(cut + 1 for cut in cuts[first:last]), *cuts[last:])
            if edges[first + 1] - edges[first] > 1:
                yield (*cuts[:first], *(cut - 1 for cut in cuts[first:last]), *cuts[last:])
