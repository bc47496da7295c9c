from __future__ import annotations

from typing import Any

import pytest

from lightning_autopipe.core import (
    CrossingValue,
    Device,
    DeviceMapping,
    DeviceTimes,
    LayerBytes,
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
    Partition,
    PlanError,
    SizedBytes,
    TiedParameter,
)
from lightning_autopipe.planner import CostModel, Work, simulate
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.unequal import unequal_step_work
from tests.planner.steps import a_device


def measured(forward_s: float, backward_s: float, **changes: Any) -> LayerMeasurement:
    fields = {"activation_bytes": 0, "peak_bytes": 0, "sent_bytes": 0, "gradient_bytes": 0}
    return LayerMeasurement(forward_s=forward_s, backward_s=backward_s, **(fields | changes))


def a_layer(name: str, one: LayerMeasurement | None = None, **changes: Any) -> LayerProfile:
    return LayerProfile(name=name, measured=one, **({"forward_flops": 1.0} | changes))


def total(cost: CostModel, layers: range) -> float:
    return cost.work_s(Work.FORWARD, layers) + cost.work_s(Work.BACKWARD, layers)


def test_measured_seconds_take_the_place_of_operations() -> None:
    layers = [a_layer("a", measured(1, 2)), a_layer("b", measured(0.5, 0))]
    cost = CostModel(ModelProfile(layers=tuple(layers)))
    assert cost.is_measured
    assert [total(cost, range(index, index + 1)) for index in range(2)] == [3.0, 0.5]
    assert cost.work_s(Work.FORWARD, range(2)) == cost.work_s(Work.RECOMPUTE, range(2)) == 1.5
    # Seconds and operations are not comparable: one layer without a measurement, and all are priced by operations.
    partly = CostModel(ModelProfile(layers=(*layers, a_layer("c"))))
    assert not partly.is_measured
    assert [total(partly, range(index, index + 1)) for index in range(3)] == [3.0, 3.0, 3.0]


def test_layers_without_counted_operations_weigh_the_same() -> None:
    nothing = CostModel(ModelProfile(layers=tuple(a_layer(name, forward_flops=0) for name in "abc")))
    assert [total(nothing, range(index, index + 1)) for index in range(3)] == [3.0, 3.0, 3.0]
    some = CostModel(ModelProfile(layers=(a_layer("a", forward_flops=0), a_layer("b", forward_flops=2e6))))
    assert [total(some, range(index, index + 1)) for index in range(2)] == [0.0, 6e6]


def a_profile_of_two_models() -> ModelProfile:
    def times(model: str, size: float, factor: float, **changes: Any) -> DeviceTimes:
        return DeviceTimes(
            device_model=model,
            microbatch_size=size,
            forward_s=(factor, 2 * factor),
            backward_s=(2 * factor, 4 * factor),
            **changes,
        )

    return ModelProfile(
        layers=(a_layer("a"), a_layer("b")),
        times=(
            times("gpu", 4, 4.0, backward_weight_s=(3.0, 5.0), optimizer_s=(0.5, 0.25)),
            times("gpu", 1, 2.0),
            times("old", 4, 10.0),
        ),
        values=(CrossingValue(producer=0, last_reader=1, forward_bytes=400, gradient_bytes=200),),
        microbatch_size=4,
    )


def test_times_go_by_device_and_size() -> None:
    cost = CostModel(a_profile_of_two_models())
    both = range(2)
    assert cost.microbatch_size == 4
    assert cost.work_s(Work.FORWARD, both) == 12
    assert cost.work_s(Work.FORWARD, both, microbatch_size=1) == 6
    assert cost.work_s(Work.FORWARD, both, microbatch_size=2) == 8  # on the line between 1 and 4
    assert cost.work_s(Work.INPUT_GRADIENT, both) + cost.work_s(Work.WEIGHT_GRADIENT, both) == 24
    assert cost.work_s(Work.WEIGHT_GRADIENT, range(1, 2)) == 5
    assert cost.work_s(Work.OPTIMIZER, both) == cost.work_s(Work.OPTIMIZER, both, microbatch_size=1) == 0.75
    assert cost.work_s(Work.FORWARD, both, device=a_device(0, relative_speed=0.5)) == 12  # its model was measured
    old = cost.work_s(Work.FORWARD, both, device=_model("old"))
    assert old == 30
    assert cost.work_s(Work.FORWARD, both, device=_model("new", relative_speed=2.0)) == 6
    assert cost.work_s(Work.FORWARD, both, device=_model("Vendor Old 16GB")) == 30  # as a driver names it
    assert cost.work_s(Work.FORWARD, both, device=_model("old Ti")) == 12  # another model
    assert (cost.sent_bytes(1), cost.gradient_bytes(1)) == (400, 200)
    assert (cost.sent_bytes(1, microbatch_size=1), cost.sent_bytes(0), cost.sent_bytes(2)) == (100, 0, 0)


def test_an_action_takes_something_besides_its_layers() -> None:
    """Once, however many layers a stage has; in the recurrence, the simulator, and both halves of a slice alike."""
    times = DeviceTimes(
        device_model="gpu", microbatch_size=4, forward_s=(1.0, 2.0), backward_s=(3.0, 4.0), overhead_s=0.5
    )
    cost = CostModel(ModelProfile(layers=(a_layer("a"), a_layer("b")), times=(times,)))
    assert cost.action_s(Work.FORWARD, range(2)) == 3.5
    assert cost.action_s(Work.FORWARD, range(1)) == 1.5
    assert cost.overhead_s(device=_model("other", relative_speed=0.5)) == 1.0
    objective = Objective(PipelineSetting(cost=cost, num_stages=2, num_microbatches=(1,)))
    assert objective.step_s((1,), (0, 0)) == simulate(objective.step_work((1,), (0, 0))).step_s == 3 + 7 + 4 * 0.5
    mapping = DeviceMapping(stage_ranks=((1,), (0,)))
    partition = Partition(cut_points=(1,), num_layers=2)
    assert simulate(unequal_step_work(cost, partition, mapping, num_microbatches=1)).step_s == 12


def _model(model: str, relative_speed: float = 1.0) -> Device:
    return Device(global_rank=0, server="A", model=model, memory_bytes=1, relative_speed=relative_speed)


@pytest.mark.parametrize(("size", "known"), [(0.5, "1 to 4"), (5, "1 to 4")])
def test_sizes_outside_of_the_measured_ones_have_no_price(size: float, known: str) -> None:
    cost = CostModel(a_profile_of_two_models())
    with pytest.raises(PlanError, match=f"no times are known for micro-batches of {size:g} samples .* {known};"):
        cost.work_s(Work.FORWARD, range(2), microbatch_size=size)
    with pytest.raises(PlanError, match="measured are 4;"):
        cost.work_s(Work.FORWARD, range(2), microbatch_size=2, device=_model("old"))


def test_parts_of_the_backward_make_the_whole_at_every_size() -> None:
    def times(size: float, backward_s: float, weight_s: float) -> DeviceTimes:
        return DeviceTimes(
            device_model="gpu",
            microbatch_size=size,
            forward_s=(1.0,),
            backward_s=(backward_s,),
            backward_weight_s=(weight_s,),
        )

    cost = CostModel(ModelProfile(layers=(a_layer("a"),), times=(times(2, 4.0, 1.0), times(4, 8.0, 4.0))))

    def price(work: Work, size: float) -> float:
        return cost.work_s(work, range(1), microbatch_size=size)

    assert [price(Work.WEIGHT_GRADIENT, size) for size in (2, 3, 4)] == [1.0, 6.0 * 0.375, 4.0]
    for size in (2, 2.5, 3, 4):
        assert price(Work.INPUT_GRADIENT, size) + price(Work.WEIGHT_GRADIENT, size) == price(Work.BACKWARD, size)


def test_layers_by_themselves_have_what_was_measured_to_the_last_digit() -> None:
    """A part is never more than the whole: sums over layers would round each of the two in a way of its own."""
    seconds = (0.1, 0.7, 1e-9, 0.3, 1 / 3)
    layers = tuple(a_layer(str(s), measured(s, s, backward_weight_s=0 if s == 0.7 else s)) for s in seconds)
    cost = CostModel(ModelProfile(layers=layers))
    assert cost.layers_s(Work.BACKWARD) == seconds
    assert cost.layers_s(Work.WEIGHT_GRADIENT) == (0.1, 0.0, 1e-9, 0.3, 1 / 3)
    device = _model("new", relative_speed=0.3)
    pairs = zip(
        cost.layers_s(Work.WEIGHT_GRADIENT, device=device), cost.layers_s(Work.BACKWARD, device=device), strict=True
    )
    assert all(part <= whole for part, whole in pairs)


def test_measured_layers_know_the_parts_of_their_backward() -> None:
    cost = CostModel(ModelProfile(layers=(a_layer("a", measured(1, 4, backward_weight_s=1.5)),)))
    assert cost.work_s(Work.INPUT_GRADIENT, range(1)) == 2.5
    with pytest.raises(PlanError, match="backward_weight_s=5 is more than backward_s=4"):
        measured(1, 4, backward_weight_s=5)


def test_tables_in_other_numbers_do_not_count() -> None:
    def times(model: str, dtype: str, seconds: float) -> DeviceTimes:
        return DeviceTimes(device_model=model, microbatch_size=1, forward_s=(seconds,), backward_s=(0.0,), dtype=dtype)

    tables = (times("gpu", "bfloat16", 1.0), times("gpu", "float32", 3.0), times("old", "float32", 9.0))
    cost = CostModel(ModelProfile(layers=(a_layer("a"),), times=tables))
    assert cost.work_s(Work.FORWARD, range(1), device=_model("gpu")) == 1.0
    assert cost.work_s(Work.FORWARD, range(1), device=_model("old", relative_speed=0.5)) == 2.0


def layer_bytes(*fields: int) -> LayerBytes:
    return LayerBytes(activation_bytes=fields[0], peak_bytes=fields[1], sent_bytes=fields[2], gradient_bytes=fields[3])


def test_bytes_of_one_size_grow_with_the_micro_batch() -> None:
    one = measured(1, 1, activation_bytes=100, peak_bytes=200, sent_bytes=40, gradient_bytes=20)
    cost = CostModel(ModelProfile(layers=(a_layer("a", one), a_layer("b", one)), microbatch_size=4))
    assert cost.layer_bytes() == (one, one)
    assert cost.layer_bytes(2)[0] == layer_bytes(50, 100, 20, 10)
    assert (cost.sent_bytes(1), cost.sent_bytes(1, microbatch_size=8)) == (40, 80)
    assert (cost.gradient_bytes(1, microbatch_size=2), cost.gradient_bytes(2)) == (10, 0)


def test_bytes_of_several_sizes_lie_on_lines() -> None:
    one = measured(1, 1, activation_bytes=100, peak_bytes=200, sent_bytes=40, gradient_bytes=20)
    profile = ModelProfile(
        layers=(a_layer("a", one),),
        microbatch_size=4,
        other_sizes=(
            SizedBytes(microbatch_size=8, layers=(layer_bytes(190, 400, 80, 40),)),
            SizedBytes(microbatch_size=2, layers=(layer_bytes(60, 100, 20, 20),)),
        ),
    )
    cost = CostModel(profile)
    assert [cost.layer_bytes(size)[0].activation_bytes for size in (2, 4, 8)] == [60, 100, 190]
    assert cost.layer_bytes(3)[0] == layer_bytes(80, 150, 30, 20)
    # Beyond them on the line through the two nearest.
    assert cost.layer_bytes(1)[0] == layer_bytes(40, 50, 10, 20)
    assert cost.layer_bytes(12)[0] == layer_bytes(280, 600, 120, 60)


def test_values_have_a_part_that_does_not_grow() -> None:
    value = CrossingValue(
        producer=0, last_reader=1, forward_bytes=100, gradient_bytes=50, fixed_forward_bytes=60, fixed_gradient_bytes=50
    )
    layers = (a_layer("a", measured(1, 1)), a_layer("b", measured(1, 1)))
    cost = CostModel(ModelProfile(layers=layers, values=(value,), microbatch_size=4))
    assert [cost.sent_bytes(1, microbatch_size=size) for size in (4, 8, 1)] == [100, 140, 70]
    assert cost.gradient_bytes(1, microbatch_size=8) == 50
    with pytest.raises(PlanError, match="fixed_forward_bytes=2 is more than forward_bytes=1"):
        CrossingValue(producer=0, last_reader=1, forward_bytes=1, gradient_bytes=1, fixed_forward_bytes=2)


def test_what_the_optimizer_remembers_is_as_measured() -> None:
    tied = (TiedParameter(name="shared", num_bytes=10, is_trainable=True),)
    layers = (
        a_layer("a", param_bytes=10, trainable_bytes=10, parameters=("shared",), optimizer_bytes=30),
        a_layer("b", param_bytes=100, trainable_bytes=100, optimizer_bytes=7, parameters=("shared",), tied=tied),
        a_layer("c", param_bytes=50, trainable_bytes=50),
    )
    cost = CostModel(ModelProfile(layers=layers))

    def remembered(owned: range) -> int:
        return stage_memory(cost, owned, num_microbatches=1, optimizer_state_ratio=2.0).optimizer_bytes

    assert remembered(range(1)) == 30
    assert remembered(range(2)) == 37
    assert remembered(range(1, 2)) == 7 + 20  # and its own copy of the shared one
    assert remembered(range(2, 3)) == 100


def test_a_skip_is_paid_at_every_cut_that_it_crosses() -> None:
    values = (
        CrossingValue(producer=0, last_reader=1, forward_bytes=1, gradient_bytes=1),
        CrossingValue(producer=1, last_reader=2, forward_bytes=1, gradient_bytes=1),
        CrossingValue(producer=2, last_reader=3, forward_bytes=1, gradient_bytes=1),
        CrossingValue(producer=0, last_reader=3, forward_bytes=10, gradient_bytes=0),
    )
    cost = CostModel(ModelProfile(layers=tuple(map(a_layer, "abcd")), values=values))
    assert [cost.sent_bytes(cut) for cut in range(5)] == [0, 11, 11, 11, 0]
    assert [cost.gradient_bytes(cut) for cut in range(5)] == [0, 1, 1, 1, 0]


def test_ties_are_paid_where_their_layers_are_on_several_stages() -> None:
    tied = (TiedParameter(name="shared", num_bytes=300, is_trainable=True),)
    frozen = (TiedParameter(name="frozen", num_bytes=7, is_trainable=False),)
    layers = (
        a_layer("a", parameters=("shared", "frozen")),
        a_layer("b"),
        a_layer("c", parameters=("shared", "frozen"), tied=tied + frozen),
        a_layer("d", parameters=("shared",), tied=tied),
    )
    cost = CostModel(ModelProfile(layers=layers))

    def tied_bytes(*cuts: int) -> dict[tuple[int, ...], int]:
        return cost.tied_bytes(Partition(cut_points=cuts, num_layers=4))

    assert tied_bytes() == {}
    assert tied_bytes(1) == {(0, 1): 300}
    assert tied_bytes(1, 3) == {(0, 1, 2): 300}
    assert tied_bytes(1, 2) == {(0, 2): 300}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward_s": (1.0,)}, "backward_s has 1 values, forward_s has 2"),
        ({"optimizer_s": (1.0,)}, "optimizer_s has 1 values"),
        ({"forward_s": (1.0, -1.0)}, r"forward_s\[1\] must be a finite number"),
        ({"backward_weight_s": (1.0, 3.0)}, r"backward_weight_s\[1\]=3.0 is more than backward_s\[1\]=2.0"),
        ({"microbatch_size": 0}, "microbatch_size must be a finite number > 0"),
    ],
)
def test_impossible_times_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"device_model": "gpu", "microbatch_size": 1, "forward_s": (1.0, 1.0), "backward_s": (2.0, 2.0)}
    with pytest.raises(PlanError, match=message):
        DeviceTimes(**(fields | changes))


def test_profiles_that_contradict_themselves_are_refused() -> None:
    layers = (a_layer("a"), a_layer("b"))
    value = CrossingValue(producer=0, last_reader=2, forward_bytes=1, gradient_bytes=1)
    with pytest.raises(PlanError, match=r"values\[0\] is read by layer 2, but layers are 0 to 1"):
        ModelProfile(layers=layers, values=(value,))
    with pytest.raises(PlanError, match="last_reader must be an integer >= 2"):
        CrossingValue(producer=1, last_reader=1, forward_bytes=1, gradient_bytes=1)
    one = DeviceTimes(device_model="gpu", microbatch_size=1, forward_s=(1.0,), backward_s=(1.0,))
    with pytest.raises(PlanError, match="times of 'gpu' are of 1 layers, not of 2"):
        ModelProfile(layers=layers, times=(one,))
    with pytest.raises(PlanError, match="twice"):
        ModelProfile(layers=layers[:1], times=(one, one))
    sized = SizedBytes(microbatch_size=2, layers=(layer_bytes(1, 1, 1, 1),))
    with pytest.raises(PlanError, match="micro-batches of 2 are of 1 layers, not of 2"):
        ModelProfile(layers=layers, microbatch_size=1, other_sizes=(sized,))
    for size in (None, 2):
        with pytest.raises(PlanError, match="each once"):
            ModelProfile(layers=layers[:1], microbatch_size=size, other_sizes=(sized,))
