"""How far ours is from brute force over all partitions and orders of devices, on random models."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np

from lightning_autopipe.core import (
    ConfigurationError,
    Device,
    DeviceTimes,
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
)
from lightning_autopipe.planner import CostModel, Work
from lightning_autopipe.planner.device_order import choose_device_order
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.schedules import default_depths

Order = tuple[Device, ...]


def a_device(rank: int, speed: float, memory_bytes: int = 1 << 50) -> Device:
    return Device(global_rank=rank, server="server", model="any", memory_bytes=memory_bytes, relative_speed=speed)


def orders(devices: Order) -> Iterator[Order]:
    """All orders that differ."""
    kinds: dict[tuple[float, int], list[Device]] = {}
    for device in devices:
        kinds.setdefault((device.relative_speed, device.memory_bytes), []).append(device)

    def rest(left: dict[tuple[float, int], int], order: Order) -> Iterator[Order]:
        if len(order) == len(devices):
            yield order
            return
        for kind, number in left.items():
            if number:
                yield from rest({**left, kind: number - 1}, (*order, kinds[kind][number - 1]))

    yield from rest({kind: len(alike) for kind, alike in kinds.items()}, ())


def gaps(number: int) -> dict[str, list[float]]:
    """By how much ours is longer than the best of all: as it is, without looking at all, and without a proof, too."""
    chance = random.Random(0)
    variants: dict[str, dict[str, int]] = {
        "as planned": {},
        "search and proof": {"max_exact": 0},
        "search alone": {"max_exact": 0, "proof_effort": 0},
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    while len(found["as planned"]) < number:
        setting = a_random_setting(chance)
        best_s = brute_force(setting)
        if best_s == math.inf:
            continue
        for name, options in variants.items():
            try:
                found[name].append(choose_device_order(setting, **options).choice.step_s / best_s - 1)
            except ConfigurationError:  # nothing was found that fits
                found[name].append(math.inf)
    return found


def a_random_setting(chance: random.Random) -> PipelineSetting:
    num_layers = chance.randint(4, 16)
    num_stages = chance.randint(2, min(6, num_layers))
    forward_s = tuple(chance.random() * chance.choice([1, 1, 1, 5]) for _ in range(num_layers))
    backward_s = tuple(seconds * chance.uniform(1, 3) for seconds in forward_s)
    layers = []
    for index in range(num_layers):
        num_bytes, kept = chance.randint(0, 100), chance.randint(0, 100)
        measured = LayerMeasurement(
            forward_s=forward_s[index],
            backward_s=backward_s[index],
            activation_bytes=kept,
            peak_bytes=kept,
            sent_bytes=0,
            gradient_bytes=0,
        )
        name = str(index)
        layers.append(
            LayerProfile(
                name=name, forward_flops=0, param_bytes=num_bytes, trainable_bytes=num_bytes, measured=measured
            )
        )
    times = DeviceTimes(device_model="profiled", microbatch_size=1, forward_s=forward_s, backward_s=backward_s)
    need = 600 * num_layers // num_stages
    devices = tuple(
        a_device(rank, chance.choice([1.0, 0.5, 0.25]), chance.choice([need // 2, need, 4 * need]))
        for rank in range(num_stages)
    )
    return PipelineSetting(
        cost=CostModel(ModelProfile(layers=tuple(layers), times=(times,))),
        num_stages=num_stages,
        num_microbatches=(2 * num_stages,),
        devices=(devices,),
    )


def brute_force(setting: PipelineSetting) -> float:
    """The shortest step of all partitions in all orders; those whose bound is above the best one are not run."""
    num_stages, num_layers, rest = setting.num_stages, setting.cost.num_layers, setting.num_microbatches[0] - 1
    depths = default_depths(num_stages)
    forward, backward = (np.array(setting.cost.prefix_s(work)) for work in (Work.FORWARD, Work.BACKWARD))
    cuts = np.array(list(combinations(range(1, num_layers), num_stages - 1)), dtype=np.int64).reshape(
        -1, num_stages - 1
    )
    edges = np.concatenate([np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), num_layers)], axis=1)
    f, b = (np.diff(prefix[edges], axis=1) for prefix in (forward, backward))
    adds = rest * b + np.maximum(0, rest - np.array(depths)) * f
    peaks = np.zeros((num_stages, num_layers + 1, num_layers + 1))
    objective = Objective(setting)
    for stage, start in product(range(num_stages), range(num_layers)):
        for stop in range(start + 1, num_layers + 1):
            peaks[stage, start, stop] = objective.memory(start, stop).peak_bytes(min(depths[stage], rest) + 1)
    peak = np.stack([peaks[stage, edges[:, stage], edges[:, stage + 1]] for stage in range(num_stages)], axis=1)
    best_s = math.inf
    for order in orders(setting.devices[0]):
        speeds = np.array([device.relative_speed for device in order])
        bounds = ((f + b) / speeds).sum(axis=1) + (adds / speeds).max(axis=1)
        bounds[(peak > np.array([device.memory_bytes for device in order])).any(axis=1)] = np.inf
        objective = Objective(replace(setting, devices=(order,)))
        for index in np.argsort(bounds):
            if bounds[index] >= best_s:
                break
            best_s = min(best_s, objective.step_s(tuple(map(int, cuts[index])), depths))
    return best_s
