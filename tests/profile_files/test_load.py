"""Profiles of public planners, in small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.core import ConfigurationError, CrossingValue, ModelProfile, PlanError
from lightning_autopipe.planner import CostModel, Work
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.profile_files import load_profile

# The mask (node2) is read by both layers, and comes after them in the file.
TEXT = """\
node1 -- ids -- forward_compute_time=0.0, backward_compute_time=0.000, activation_size=8.000, parameter_size=0.000
node3 -- layer_0 -- forward_compute_time=2.5, backward_compute_time=4, activation_size=100, parameter_size=400
node4 -- layer_1, with (a=b) -- forward_compute_time=1, backward_compute_time=2, activation_size=50, parameter_size=200
node2 -- mask -- forward_compute_time=0.5, backward_compute_time=0, activation_size=30, parameter_size=0
\tnode1 -- node2
        node1 -- node3
\tnode3 -- node4
\tnode2 -- node3
\tnode2 -- node4
"""


def node(name: str, activation: str = "10", *, forward: str = "1") -> str:
    return (
        f"{name} -- op -- forward_compute_time={forward}, backward_compute_time=2, activation_size={activation}, "
        "parameter_size=0\n"
    )


def written(folder: Path, text: str, name: str = "graph.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def crossing(profile: ModelProfile) -> set[tuple[int, int, int, int]]:
    return {(value.producer, value.last_reader, value.forward_bytes, value.gradient_bytes) for value in profile.values}


def test_a_text_graph_becomes_layers_in_topological_order(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, TEXT, "bert-2-pbs-6.txt"), device_model="V100 (DAPPLE)")
    names = ["node1 ids", "node2 mask", "node3 layer_0", "node4 layer_1, with (a=b)"]
    assert [layer.name for layer in profile.layers] == names
    assert [layer.param_bytes for layer in profile.layers] == [0, 0, 400, 200]
    (times,) = profile.times
    assert times.forward_s == pytest.approx((0.0, 0.0005, 0.0025, 0.001))
    assert times.backward_s == pytest.approx((0.0, 0.0, 0.004, 0.002))
    assert (times.device_model, times.microbatch_size, profile.microbatch_size) == ("V100 (DAPPLE)", 6.0, 6.0)
    # ids until layer_0, the mask until layer_1; gradients are as large.
    assert crossing(profile) == {(0, 2, 8, 8), (1, 3, 30, 30), (2, 3, 100, 100)}
    cost = CostModel(profile)
    assert [cost.sent_bytes(cut) for cut in range(5)] == [0, 8, 38, 130, 0]


def test_of_several_nodes_that_could_be_next_the_first_of_the_file_is(tmp_path: Path) -> None:
    text = "".join(map(node, ("c", "a", "d", "b"))) + " a -- c\n b -- d\n"
    assert [layer.name for layer in load_profile(written(tmp_path, text)).layers] == ["a op", "c op", "b op", "d op"]


def test_a_list_of_sizes_is_one_output_for_each_edge(tmp_path: Path) -> None:
    text = node("a", "[10; 20]") + node("b") + node("c", "0") + " a -- b\n a -- c\n b -- c\n"
    profile = load_profile(written(tmp_path, text))
    assert crossing(profile) == {(0, 1, 10, 10), (0, 2, 20, 20), (1, 2, 10, 10)}


def test_more_outputs_than_edges_all_live_until_the_last_reader(tmp_path: Path) -> None:
    text = node("a", "[10.0; 20.0; 5.0]") + node("b") + node("c", "0") + " a -- b\n a -- c\n b -- c\n"
    profile = load_profile(written(tmp_path, text))
    assert sorted(crossing(profile)) == [(0, 2, 5, 5), (0, 2, 10, 10), (0, 2, 20, 20), (1, 2, 10, 10)]


def test_a_stage_keeps_what_it_received_and_what_its_nodes_made(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, TEXT))
    # ids and mask: nothing received, 8 + 30 kept; sent are both, which are kept already.
    assert stage_memory(CostModel(profile), range(2), num_microbatches=4, optimizer_state_ratio=2).stash_bytes == 38
    # The two layers: 38 received, 150 made.
    last = stage_memory(CostModel(profile), range(2, 4), num_microbatches=4, optimizer_state_ratio=2)
    assert (last.stash_bytes, last.parameter_bytes, last.optimizer_bytes) == (188, 600, 1200)


def test_units_and_sizes_can_be_said(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT, "bert-2-pbs-6.txt")
    profile = load_profile(path, time_unit="us", microbatch_size=4)
    assert profile.times[0].forward_s[2] == pytest.approx(2.5e-6)
    assert (profile.microbatch_size, profile.values[0].forward_bytes) == (4, 8)  # sizes of files are of a micro-batch
    for options in ({"time_unit": "h"}, {"microbatch_size": 0}, {"device_model": ""}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            load_profile(path, **options)  # type: ignore[arg-type]


def test_long_names_are_cut(tmp_path: Path) -> None:
    text = node("a").replace("op", "x" * 400)
    assert load_profile(written(tmp_path, text)).layers[0].name == f"a {'x' * 57}…"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("=2.5", "=-2.5"), "graph.txt:2: forward_compute_time must be a finite number >= 0, got '-2.5'"),
        (TEXT.replace("=4,", "=nan,"), "graph.txt:2: backward_compute_time must be a finite number >= 0, got 'nan'"),
        (TEXT.replace("=100,", "=[1; b],"), "graph.txt:2: activation_size must be a finite number >= 0, got 'b'"),
        (TEXT.replace("parameter_size=200", "size=200"), "graph.txt:3: 'node4 -- layer_1, with"),
        (TEXT + "\tnode1 - node2\n", "graph.txt:10: 'node1 - node2' is no edge; expected"),
        (TEXT + "\tnode4 -- node9\n", "graph.txt:10: the edge node4 -- node9 names node9, which is no node"),
        (TEXT + node("node3"), "graph.txt:10: node3 comes twice, first in line 2"),
        (TEXT + "\tnode4 -- node3\n", "graph.txt:3: the edges node4 -- node3 -- node4 form a cycle"),
        (node("a") + " a -- a\n", "graph.txt:1: the edges a -- a form a cycle"),
        (re.sub(r"time=[\d.]+", "time=0", TEXT), "graph.txt: none of the 4 nodes takes any time"),
        ("", "graph.txt: empty"),
        ("a,b\n1,2\n", "graph.txt: no profile: it is neither JSON nor"),
    ],
)
def test_damaged_text_says_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        load_profile(written(tmp_path, text))


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.txt: cannot be read: No such file"):
        load_profile(tmp_path / "none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file: byte 0"):
        load_profile(tmp_path / "binary.txt")


# Piper ---------------------------------------------------------------------


def piper_node(number: int, seconds: float, memory: float) -> dict[str, Any]:
    entry = {"timePerSample": seconds, "parameterSize": 40.0, "memoryUsageA": memory, "memoryUsageB": 80.0}
    other = {**entry, "id": "activation recomp", "timePerSample": 9.0, "memoryUsageA": 1.0}
    return {"id": number, "name": "layer", "TMPCs": {"2": [], "1": [other, {**entry, "id": "vanilla"}]}}


def piper(**changes: Any) -> dict[str, Any]:
    edge = {"sourceId": 2, "destId": 0, "communicationCost": 8.0}
    edges = [edge, {**edge, "destId": 1}, {"sourceId": 0, "destId": 1, "communicationCost": 16.5}]
    nodes = [piper_node(0, 3.0, 100.0), piper_node(1, 0.3, 200.0), piper_node(2, 0.0, 8.0)]
    return {"maxDevices": 8, "bandwidth": 1e9, "nodes": nodes, "edges": edges, **changes}


def load_piper(folder: Path, document: dict[str, Any], **options: Any) -> ModelProfile:
    return load_profile(written(folder, json.dumps(document), "model.json"), **options)


def test_piper_nodes_without_recomputation_on_one_device(tmp_path: Path) -> None:
    profile = load_piper(tmp_path, piper(), microbatch_size=2)
    assert [layer.name for layer in profile.layers] == ["node2 layer", "node0 layer", "node1 layer"]
    cost = CostModel(profile)
    assert cost.work_s(Work.FORWARD, range(3)) == pytest.approx(2 * 3.3 / 3)
    assert cost.work_s(Work.BACKWARD, range(3)) == pytest.approx(2 * 3.3 * 2 / 3)
    # Of two samples; what node 2 sends to both is one value.
    assert profile.values == (
        CrossingValue(producer=0, last_reader=2, forward_bytes=16, gradient_bytes=16),
        CrossingValue(producer=1, last_reader=2, forward_bytes=33, gradient_bytes=33),
    )
    measured = profile.layers[1].measured
    assert measured is not None
    assert (measured.activation_bytes, profile.layers[1].param_bytes) == (200, 40)


def test_piper_times_in_milliseconds_need_saying(tmp_path: Path) -> None:
    seconds = CostModel(load_piper(tmp_path, piper())).work_s(Work.FORWARD, range(3))
    milliseconds = CostModel(load_piper(tmp_path, piper(), time_unit="ms")).work_s(Work.FORWARD, range(3))
    assert milliseconds == pytest.approx(seconds / 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": {}}, "model.json: nodes must be a list, got {}"),
        ({"nodes": []}, "model.json: edges[0]: names node2, which is no id of the file's 0 nodes"),
        ({"nodes": [], "edges": []}, "model.json: no nodes"),
        ({"nodes": [piper_node(0, 1, 1), 7]}, "model.json: nodes[1] must be an object, got 7"),
        ({"nodes": [piper_node(0, 1, 1)] * 2}, "model.json: nodes[1]: id node0 comes twice, first in nodes[0]"),
        (
            {"nodes": [{"id": 0}]},
            'model.json: nodes[0]: TMPCs must have a list for degree "1" (one device), got nothing',
        ),
        (
            {"nodes": [{"id": 0, "TMPCs": {"1": [{"id": "x"}]}}]},
            "no entry 'vanilla' (without recomputation); it has ['x']",
        ),
        (
            {"nodes": [piper_node(0, -1, 1)], "edges": []},
            "nodes[0]: timePerSample must be a finite number >= 0, got -1",
        ),
        ({"nodes": [piper_node(0, 1, 1)], "edges": [{"sourceId": 0}]}, "edges[0]: destId must be an integer or a text"),
    ],
)
def test_damaged_piper_files_say_where_and_what(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        load_piper(tmp_path, piper(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [}', "model.json:1: not JSON: Expecting value (column 12)"),
        ('{"nodes": [], "nodes": []}', "not JSON: a key is given twice: ['nodes']"),
        ('{"a": 1}', "model.json: no profile: JSON with a;"),
    ],
)
def test_damaged_json(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        load_profile(written(tmp_path, text, "model.json"))


# Our own -------------------------------------------------------------------


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, TEXT, "bert-2-pbs-6.txt"), device_model="V100 (DAPPLE)")
    path = written(tmp_path, profile.to_json(), "saved.json")
    assert load_profile(path) == profile
    with pytest.raises(ConfigurationError, match=r"saved\.json: time_unit given, but a profile that was saved here"):
        load_profile(path, time_unit="ms")
    path.write_text(profile.to_json().replace('"microbatch_size"', '"size"'))
    with pytest.raises(PlanError, match=r"saved\.json: "):
        load_profile(path)
