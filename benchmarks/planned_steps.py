"""Plans for stages that sleep, by the planner's own search, and what it predicts for what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.contest import Entry, EntryTimes
from benchmarks.reporting import at_most
from benchmarks.stage_modules import Seconds, Sleeping
from lightning_autopipe.core import ClusterTopology, Device, Link, ModelProfile
from lightning_autopipe.core.profile import DeviceTimes, LayerMeasurement, LayerProfile
from lightning_autopipe.planner import CostModel, SearchSpace, search, simulate
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.planner.workload import StageWork
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.schedules.stash import peak_stash_size

MemoryOf = Literal["any", "each stage of 1F1B", "first stages of 1F1B"]
KEPT_BYTES = 64 << 20
"""What a stage is taken to keep of a whole micro-batch: so much that messages in buffers hardly count beside it."""
MUCH_BYTES = 1 << 45
_ELSEWHERE = 1000.0
"""How many times longer a layer is said to take on a device that it is not to be on."""
_PINNED = "device of stage"
_EMPTY_MICROBATCHES = 32
_MAX_MEDIAN_ERROR, _MAX_ERROR = 0.05, 0.12
"""Of the simulated step against the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Even stages of one layer each, on a device each.

    What is planned for is a batch of ``num_microbatches`` whole micro-batches; the planner may take smaller ones.
    """

    num_stages: int
    num_microbatches: int
    seconds: Mapping[int, Seconds]
    """What a stage takes, by the samples in a micro-batch; the largest one is whole."""
    sample_bytes: int = 0
    """Of a sample's activations at a boundary."""
    overhead_s: float = 0.0
    """What each action takes besides."""

    @property
    def whole(self) -> int:
        """Samples in a whole micro-batch."""
        return max(self.seconds)

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.num_microbatches * self.whole

    def maker(self) -> Sleeping:
        """The stages themselves."""
        return Sleeping(seconds=dict(self.seconds), sample_bytes=self.sample_bytes)

    def profile(self, *, is_pinned: bool = False) -> ModelProfile:
        """The layers; where devices are pinned, each layer is quick on its own device only."""
        whole, crossing_bytes = self.seconds[self.whole], self.whole * self.sample_bytes
        layers = []
        for index in range(self.num_stages):
            is_last = index == self.num_stages - 1
            measured = LayerMeasurement(
                forward_s=whole.forward,
                backward_s=whole.backward,
                backward_weight_s=whole.weight,
                activation_bytes=KEPT_BYTES,
                received_kept_bytes=crossing_bytes if index else 0,
                sent_kept_bytes=0 if is_last else crossing_bytes,
                peak_bytes=KEPT_BYTES,
                sent_bytes=0 if is_last else crossing_bytes,
                gradient_bytes=0 if is_last else crossing_bytes,
            )
            layers.append(LayerProfile(name=str(index), forward_flops=0, measured=measured))
        times = []
        for position in range(self.num_stages) if is_pinned else (None,):
            factors = [1.0 if position in (None, index) else _ELSEWHERE for index in range(self.num_stages)]
            times += [
                DeviceTimes(
                    device_model=_model(position),
                    microbatch_size=samples,
                    forward_s=tuple(factor * taken.forward for factor in factors),
                    backward_s=tuple(factor * taken.backward for factor in factors),
                    backward_weight_s=tuple(factor * taken.weight for factor in factors),
                    overhead_s=self.overhead_s,
                )
                for samples, taken in sorted(self.seconds.items())
            ]
        return ModelProfile(layers=tuple(layers), times=tuple(times), microbatch_size=self.whole)

    def plain_stash_bytes(self, num_samples: int | None = None) -> tuple[int, ...]:
        """What each stage keeps under plain 1F1B, as torch runs it.

        Args:
            num_samples: of a micro-batch; None: whole ones.
        """
        size = num_samples or self.whole
        number, of_one = self.batch_size // size, KEPT_BYTES * size // self.whole
        return tuple(min(self.num_stages - index, number) * of_one for index in range(self.num_stages))

    def memory_bytes(self, stage_index: int, num_alive: int) -> int:
        """What a stage needs, by the planner's account, to keep some whole micro-batches."""
        memory = stage_memory(
            CostModel(self.profile()),
            range(stage_index, stage_index + 1),
            num_microbatches=self.num_microbatches,
            microbatch_size=self.whole,
            optimizer_state_ratio=2.0,
        )
        return memory.peak_bytes(min(num_alive, self.num_microbatches))

    def space(
        self,
        *,
        servers: Sequence[str] = (),
        links: Sequence[Link] = (),
        num_microbatches: int | None = None,
        memory_of: MemoryOf = "any",
        is_pinned: bool = False,
        kinds: Sequence[str] = (),
    ) -> SearchSpace:
        """What the planner may choose.

        Args:
            servers: of each global rank; empty: all on one.
            links: between them.
            num_microbatches: so many; None: as the planner likes.
            memory_of: what each device has: as much as wanted, what plain 1F1B of whole micro-batches needs on the
                stage that the launcher's order gives it, or what any stage needs for as many as its first one keeps.
            kinds: schedules that it may choose beside 1F1B of any depths.
            is_pinned: whether that order is to be kept: stage s on rank ``num_stages - 1 - s``.
        """
        positions = range(self.num_stages)
        memory = [MUCH_BYTES] * self.num_stages
        if memory_of == "each stage of 1F1B":
            memory = [self.memory_bytes(index, self.num_stages - index) for index in reversed(positions)]
        elif memory_of == "first stages of 1F1B":
            memory = [max(self.memory_bytes(index, self.num_stages) for index in positions)] * self.num_stages
        devices = tuple(
            Device(
                global_rank=rank,
                server=servers[rank] if servers else "here",
                model=_model(self.num_stages - 1 - rank if is_pinned else None),
                memory_bytes=memory[rank],
            )
            for rank in range(self.num_stages)
        )
        return SearchSpace(
            cost=CostModel(self.profile(is_pinned=is_pinned)),
            network=LinkNetwork(ClusterTopology(devices=devices, links=tuple(links))),
            batch_size=self.batch_size,
            num_stages=self.num_stages,
            num_replicas=1,
            num_microbatches=num_microbatches or "auto",
            kinds=tuple(kinds),
            memory_share=1.0,
        )

    def entry(self, title: str, candidate: Candidate) -> Entry:
        """A candidate's step, to be run."""
        (schedule,) = candidate.work.schedules
        return Entry(
            title=title,
            model=self.maker(),
            num_microbatches=candidate.num_microbatches,
            num_samples=self.batch_size // candidate.num_microbatches,
            schedule=schedule,
            ranks=tuple(rank for (rank,) in candidate.mapping.stage_ranks),
        )


def planned(space: SearchSpace) -> Candidate:
    """What the planner chooses."""
    return search(space).best


def _model(position: int | None) -> str:
    return "sleeping device" if position is None else f"{_PINNED} {position}"


def stash_bytes(candidate: Candidate, model: PlannedModel) -> tuple[int, ...]:
    """The most that each stage keeps."""
    (schedule,) = candidate.work.schedules
    share = model.batch_size / candidate.num_microbatches / model.whole
    return tuple(round(share * KEPT_BYTES * peak_stash_size(schedule, index)) for index in range(model.num_stages))


def linear_seconds(whole: Seconds, num_samples: int) -> dict[int, Seconds]:
    """For micro-batches of a whole size and of its halves."""
    sizes = [num_samples >> shift for shift in range(num_samples.bit_length())]
    return {size: whole.times(size / num_samples) for size in sizes}


def empty_entry(num_stages: int) -> Entry:
    """Steps of nothing, to know what an action takes besides its layers."""
    return Entry(
        title="empty",
        model=Sleeping(seconds={1: Seconds(0.0, 0.0)}, sample_bytes=4),
        num_microbatches=_EMPTY_MICROBATCHES,
        num_samples=1,
        schedule=get_schedule("1f1b", num_stages, _EMPTY_MICROBATCHES),
    )


def empty_action_s(times: EntryTimes, num_stages: int) -> float:
    """CPU time that an action of `empty_entry` takes: where nobody sleeps, ranks wait for each other's cores."""
    return times.median_cpu_s / (2 * _EMPTY_MICROBATCHES * num_stages)


def predicted_s(candidate: Candidate, times: EntryTimes, network: LinkNetwork | None, overhead_s: float = 0.0) -> float:
    """The simulated step with what was measured.

    Args:
        candidate: of which the order is.
        times: what each stage took alone.
        network: links as they were measured.
        overhead_s: what each action takes besides its layers.
    """
    (stages,) = candidate.work.stages
    measured = tuple(_measured(work, taken, overhead_s) for work, taken in zip(stages, times.alone, strict=True))
    return simulate(replace(candidate.work, stages=(measured,), network=network)).step_s


def _measured(work: StageWork, taken: Sequence[Seconds], overhead_s: float) -> StageWork:
    units = tuple(
        replace(
            unit,
            forward_s=seconds.forward + overhead_s,
            backward_s=seconds.backward + (2 if seconds.weight else 1) * overhead_s,
            backward_weight_s=seconds.weight + overhead_s if seconds.weight else 0.0,
        )
        for unit, seconds in zip(work.units, taken, strict=True)
    )
    return replace(work, units=units)


def error_shortfalls(errors: Sequence[float]) -> list[str]:
    """Of simulated against measured steps; prints what they are."""
    sizes = [abs(error) for error in errors]
    print(f"\nPredicted against measured: median error {statistics.median(sizes):.2%}, largest {max(sizes):.2%}")
    return [
        *at_most("median error of the prediction", statistics.median(sizes), _MAX_MEDIAN_ERROR),
        *at_most("largest error of the prediction", max(sizes), _MAX_ERROR),
    ]
