from __future__ import annotations

import pytest

from lightning_autopipe.core import Action, ActionType, PlanError, Schedule


@pytest.mark.parametrize("text", ["2F0", "0B13", "2F0.1", "1SA2", "3RA0", "10SG4", "0RG7.0"])
def test_an_action_is_read_as_it_is_printed(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0.", "-1F0", "2F0 1"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no action"):
        Action.parse(text)


def test_the_counterpart_of_a_transfer_is_at_the_neighbour() -> None:
    assert str(Action.parse("1SA2").counterpart) == "2RA2"
    assert str(Action.parse("1SG2").counterpart) == "0RG2"
    for kind in ("SA", "RA", "SG", "RG"):
        action = Action.parse(f"3{kind}5.1")
        assert action.counterpart.counterpart == action
        assert action.counterpart.stage_index == action.peer_stage_index


@pytest.mark.parametrize(
    "change",
    [{"type": "F"}, {"stage_index": -1}, {"microbatch_index": 1.0}, {"microbatch_index": True}, {"slice_index": -1}],
)
def test_an_action_refuses_wrong_fields(change: dict[str, object]) -> None:
    fields: dict[str, object] = {"type": ActionType.FORWARD, "stage_index": 0, "microbatch_index": 0}
    with pytest.raises(PlanError, match=next(iter(change))):
        Action(**(fields | change))  # type: ignore[arg-type]


def test_a_schedule_knows_its_stages_and_whether_it_is_lowered() -> None:
    forward, send = Action.parse("0F0"), Action.parse("0SA0")
    plain = Schedule(name="x", actions_by_rank=((forward,), ()), num_microbatches=1)
    assert plain.num_stages == 2
    assert not plain.is_lowered
    assert Schedule(name="x", actions_by_rank=((forward, send), ()), num_microbatches=1).is_lowered
    with pytest.raises(PlanError, match="at least one rank"):
        Schedule(name="x", actions_by_rank=(), num_microbatches=1)
    with pytest.raises(PlanError, match=r"actions_by_rank\[0\]\[0\]"):
        Schedule(name="x", actions_by_rank=(("0F0",),), num_microbatches=1)  # type: ignore[arg-type]
