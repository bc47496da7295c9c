"""Cluster, timeline, profile and error types: what they refuse, and that the tree is as drawn."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lightning_autopipe import core
from lightning_autopipe.core import (
    Action,
    AutoPipeError,
    ClusterTopology,
    ConfigurationError,
    Device,
    LayerProfile,
    Link,
    ModelProfile,
    PlanError,
    Timeline,
    TimelineEvent,
    errors,
)


def a_device(**changes: Any) -> Device:
    fields: dict[str, Any] = {"global_rank": 0, "server": "a", "model": "gpu", "memory_bytes": 8 << 30}
    return Device(**(fields | changes))


def a_link(**changes: Any) -> Link:
    return Link(**({"a": "a", "b": "b", "bandwidth_bytes_per_s": 1e9} | changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a_device(memory_bytes=0), "Device 0: memory_bytes must be an integer >= 1"),
        (lambda: a_device(relative_speed=0), "relative_speed must be a finite number > 0"),
        (lambda: a_device(server=""), "server must be a non-empty string"),
        (lambda: a_device(server="rank 3"), "server must not be 'rank 3', which names a device's own point"),
        (lambda: a_link(kind=3), "kind must be a string, got 3"),
        (lambda: a_link(b="a"), "joins two different points"),
        (lambda: a_link(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s must be a finite number > 0"),
        (lambda: a_link(bandwidth_bytes_per_s=float("inf")), "must be a finite number"),
        (lambda: a_link(latency_s=-1.0), "latency_s"),
        (lambda: a_link(duplex="both"), r"duplex must be one of \('full', 'half'\), got 'both'"),
        (lambda: a_link(sharing="none"), "sharing"),
        (lambda: ClusterTopology(devices=()), "at least one device"),
        (lambda: ClusterTopology(devices=(a_device(global_rank=1),)), r"devices\[0\] has global_rank 1"),
        (
            lambda: ClusterTopology(devices=(a_device(),), links=(a_link(), a_link(b="rank 1"))),
            r"links\[1\] leads to 'rank 1', but there are 1 devices",
        ),
    ],
)
def test_cluster_types_refuse_wrong_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_cluster_counts_its_devices() -> None:
    devices = (a_device(), a_device(global_rank=1))
    assert ClusterTopology(devices=devices, links=(a_link(),)).world_size == 2


def test_a_cluster_knows_its_servers() -> None:
    devices = tuple(a_device(global_rank=rank, server=server) for rank, server in enumerate("bab"))
    cluster = ClusterTopology(devices=devices)
    assert cluster.servers == ("b", "a")
    assert [cluster.server_ranks(server) for server in "bac"] == [(0, 2), (1,), ()]


def test_timelines_refuse_wrong_values() -> None:
    action = Action.parse("0F0")
    event = TimelineEvent(action=action, global_rank=0, start_s=0.0, end_s=1.0)
    assert Timeline(events=(event,), step_s=1.0, bubble_fraction=0.0).peak_bytes == ()
    with pytest.raises(PlanError, match=r"end_s=1.0 lies before start_s=2.0"):
        TimelineEvent(action=action, global_rank=0, start_s=2.0, end_s=1.0)
    with pytest.raises(PlanError, match="bubble_fraction must be from 0 to 1"):
        Timeline(events=(event,), step_s=1.0, bubble_fraction=1.5)


def test_profiles_refuse_wrong_values() -> None:
    with pytest.raises(PlanError, match="at least one layer"):
        ModelProfile(layers=())
    with pytest.raises(PlanError, match="LayerProfile 'a': boundary_bytes must be an integer >= 0, got -1"):
        LayerProfile(name="a", forward_flops=0, boundary_bytes=-1)
    with pytest.raises(PlanError, match="num_trainable_parameters=2 is more than num_parameters=1"):
        LayerProfile(name="a", forward_flops=0, num_parameters=1, num_trainable_parameters=2)


def test_the_docstring_draws_the_whole_exception_tree() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, AutoPipeError)
        assert f"{name} " in errors.__doc__
    assert issubclass(ConfigurationError, ValueError)


def test_every_type_is_frozen_slotted_and_keyword_only() -> None:
    types = [value for value in vars(core).values() if inspect.isclass(value) and dataclasses.is_dataclass(value)]
    assert len(types) >= 12
    for kind in types:
        parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
        assert parameters.frozen, kind
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind
        assert "__slots__" in vars(kind), kind
