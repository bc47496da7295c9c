"""Bytes, busy shares and contending flows of links, by hand."""

from __future__ import annotations

import pytest

from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.contention import link_loads
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.objective import Objective
from tests.planner.mappings import a_cluster, a_mapping_setting, a_model


def test_link_loads_by_hand() -> None:
    """Two servers, A: stage 1, B: stage 0; 3 micro-batches of 4 bytes there and 4 back, 1 byte a second."""
    setting = a_mapping_setting(a_model([10.0, 10.0], num_bytes=4), a_cluster("AB"), 2, 1, 3)
    found = choose_mapping(setting)
    loads = {(load.sender, load.receiver): load for load in found.link_loads()}
    assert set(loads) == {("B", "switch"), ("switch", "A"), ("A", "switch"), ("switch", "B")}
    for load in loads.values():
        assert (load.stage_bytes, load.reduction_bytes, load.num_bytes) == (12, 0, 12)
        assert load.busy_share == pytest.approx(12 / found.step_s)
        assert load.contended_share == 0
        assert load.contending_flows == ()
    assert [(flow.sender, flow.receiver) for flow in loads["B", "switch"].flows] == [(1, 0)]


def test_flows_that_contend_are_named() -> None:
    """Two replicas across the same two servers: their messages meet on the servers' links, and so do their sums."""
    profile = a_model([1.0, 1.0], num_bytes=4, gradient_bytes=6)
    setting = a_mapping_setting(profile, a_cluster("AABB"), 2, 2, 4)
    work = Objective(setting.pipelines(((2, 0), (3, 1)), (2, 2))).step_work((1,), setting.depths)
    timeline = simulate(work)
    load = next(load for load in link_loads(work, timeline) if load.sender == "B")
    assert load.stage_bytes == 2 * 2 * 4
    assert load.reduction_bytes == 0  # both replicas of a stage are in one server
    assert {(flow.sender, flow.receiver) for flow in load.contending_flows} == {(2, 0), (3, 1)}
    assert load.contended_share == pytest.approx(16 / timeline.step_s)
    across = Objective(setting.pipelines(((1, 0), (3, 2)), (2, 2))).step_work((1,), setting.depths)
    load = next(load for load in link_loads(across, simulate(across)) if load.sender == "B")
    assert (load.stage_bytes, load.reduction_bytes) == (0, 2 * 6)
    assert len(load.contending_flows) == 2
