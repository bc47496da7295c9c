"""Unlike numbers of ranks for stages: hand cases, brute force on few devices, never longer than with equal counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from lightning_autopipe.core import ConfigurationError, DeviceMapping, Partition
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.count_table import CountTable
from lightning_autopipe.planner.links import LinkNetwork, alike_devices
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.replica_counts import choose_replica_counts
from lightning_autopipe.planner.unequal import unequal_step_work
from tests.planner.mappings import SAME, a_cluster, a_mapping_setting, a_model
from tests.planner.steps import a_profile


def a_cost(times: Sequence[float], gradient_bytes: Sequence[int], num_bytes: int = 0) -> CostModel:
    """Backwards take as long as forwards."""
    profile = a_model(times, num_bytes=num_bytes)
    layers = tuple(
        type(layer)(name=layer.name, forward_flops=1.0, param_bytes=size, trainable_bytes=size)
        for layer, size in zip(profile.layers, gradient_bytes, strict=True)
    )
    return CostModel(a_profile(times, times, layers=layers, values=profile.values))


def test_a_stage_with_three_quarters_of_the_work_gets_three_quarters_of_the_devices() -> None:
    """Gradients of the last layer take long to sum; 3-1 is busy for 12 / 3 x 6 and 12 x 2, 2-2 for 12 / 2 x 6."""
    cost = a_cost([3.0, 1.0], [0, 10**6])
    found = choose_replica_counts(cost, LinkNetwork(a_cluster("ABCD", bandwidth=1000.0)), num_microbatches=12)
    assert found.counts == (3, 1)
    assert found.step_s < 0.9 * found.equal_step_s
    assert found.step_s == simulate(found.step_work).step_s
    assert found.partition.cut_points == (1,)
    assert found.windows[-1] == 0


def test_the_table_by_hand() -> None:
    """6 micro-batches, 4 devices, layers that take 2, 2, 4, 8: two turns of 16 on three or four; 8 and 8 on two."""
    table = CountTable(a_cost([1.0, 1.0, 2.0, 4.0], [0] * 4), alike_devices(4), num_microbatches=6)
    assert table.best(1) == ((), (3,), 32.0)
    assert table.best(2) == ((3,), (2, 2), 24.0)
    cuts, counts, seconds = table.best(3) or ((), (), 0.0)
    assert (counts, seconds) == ((1, 1, 2), 24.0)
    assert cuts == (2, 3)
    assert table.best_cuts((3, 1)) == ((3,), (3, 1), 48.0)
    assert table.best(5) is None


def every_choice(num_layers: int, num_devices: int) -> Iterator[tuple[Partition, DeviceMapping]]:
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for cuts in combinations(range(1, num_layers), num_stages - 1):
            for counts in product(range(1, num_devices + 1), repeat=num_stages):
                if sum(counts) > num_devices:
                    continue
                ranks = iter(range(num_devices))
                stages = [tuple(next(ranks) for _ in range(count)) for count in reversed(counts)]
                yield Partition(cut_points=cuts, num_layers=num_layers), DeviceMapping(stage_ranks=tuple(stages[::-1]))


@pytest.mark.parametrize("seed", range(12))
def test_few_alike_devices_are_as_good_as_brute_force(seed: int) -> None:
    """All partitions and counts under default windows, simulated."""
    draw = random.Random(seed)
    times = [float(draw.randint(1, 9)) for _ in range(5)]
    cost = a_cost(times, [draw.choice([0, 5, 50]) for _ in times], num_bytes=draw.choice([0, 2]))
    network = LinkNetwork(a_cluster("ABCD", bandwidth=5.0))
    best_s = min(
        simulate(unequal_step_work(cost, partition, mapping, network=network, num_microbatches=8)).step_s
        for partition, mapping in every_choice(len(times), 4)
    )
    found = choose_replica_counts(cost, network, num_microbatches=8)
    assert found.step_s <= best_s * SAME
    assert found.step_s <= found.equal_step_s * SAME


def test_moves_of_cuts_and_of_devices_shorten_the_step() -> None:
    """Unlike devices, where starts of the table are far from the best: 145, cuts alone 133.3, with devices 124."""
    draw = random.Random(9)
    times = [float(draw.randint(1, 9)) for _ in range(6)]
    cost = a_cost(times, [draw.choice([0, 5, 50]) for _ in times], num_bytes=draw.choice([0, 2]))
    network = LinkNetwork(a_cluster("AABBCC", [1.0, 0.5, 1.0, 0.25, 1.0, 1.0], bandwidth=5.0))
    start = choose_replica_counts(cost, network, num_microbatches=8, equal=[], effort=0)
    found = choose_replica_counts(cost, network, num_microbatches=8, equal=[])
    assert start.step_s > 140
    assert found.step_s < 125


def test_known_mappings_with_equal_counts_are_among_the_candidates() -> None:
    """Nothing is shorter than data parallelism where gradients are nothing; given, it is kept as it is."""
    network = LinkNetwork(a_cluster("AAAA"))
    cost = CostModel(a_model([1.0, 2.0, 3.0]))
    setting = a_mapping_setting(cost.profile, network.topology, 1, 4, 8)
    known = choose_mapping(setting)
    found = choose_replica_counts(cost, network, num_microbatches=8, equal=[known])
    assert found.counts == (4,)
    assert found.step_s == found.equal_step_s == known.step_s == simulate(found.step_work).step_s
    alone = choose_replica_counts(cost, network, num_microbatches=8, equal=[])
    assert alone.step_s == pytest.approx(known.step_s)


def test_memory_and_unlike_speeds_count() -> None:
    """4 layers of 4000 bytes with gradients and state, and room for 2 of them a device: at least two stages."""
    cost = CostModel(a_model([1.0] * 4, gradient_bytes=1000))
    found = choose_replica_counts(cost, alike_devices(4, memory_bytes=9_000), num_microbatches=8)
    assert found.partition.num_stages > 1
    assert max(len(found.partition.stage_layers(stage)) for stage in range(found.partition.num_stages)) == 2
    with pytest.raises(ConfigurationError, match="nothing was found that fits the devices' memory"):
        choose_replica_counts(cost, alike_devices(3, memory_bytes=4_500), num_microbatches=8)
    roomy = choose_mapping(a_mapping_setting(cost.profile, alike_devices(3).topology, 3, 1, 8))
    with pytest.raises(ConfigurationError, match="nothing was found that fits the devices' memory"):
        choose_replica_counts(cost, alike_devices(3, memory_bytes=4_500), num_microbatches=8, equal=[roomy])
    unlike = LinkNetwork(a_cluster("AAAA", [1.0, 0.5, 0.5, 1.0]))
    found = choose_replica_counts(CostModel(a_model([1.0, 1.0])), unlike, num_microbatches=12, num_stages=2)
    assert found.step_s <= found.equal_step_s * SAME


def test_numbers_of_stages_that_cannot_be_are_refused() -> None:
    cost = CostModel(a_model([1.0] * 3))
    with pytest.raises(ConfigurationError, match=r"num_stages=4 for 3 layers and 8 devices.*set 1 to 3"):
        choose_replica_counts(cost, alike_devices(8), num_microbatches=8, num_stages=4)
