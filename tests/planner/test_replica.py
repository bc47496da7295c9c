"""What a pipeline takes at least."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.planner.recurrence import Hop, one_f_one_b_ends
from lightning_autopipe.planner.replica import pipeline_bound_s


@pytest.mark.parametrize(
    ("num_microbatches", "depth", "expected"),
    [
        (2, 1, 12),  # a way, and both micro-batches on stage 1
        (4, 1, 22),  # two ways, and what remains of 4 x 2 without one forward and one backward
        (9, 1, 50),  # five ways of 8, and what remains of 9 x 2 without four of each
        (9, 3, 30),  # three ways, without six of each
        (3, 3, 14),
    ],
)
def test_waits_for_a_slow_link_by_hand(num_microbatches: int, depth: int, expected: float) -> None:
    """Two stages of 1 and 1, with 3 there and 3 back: from stage 0 a way to the other end and back is 8."""
    depths = (depth, 0)
    bound_s = pipeline_bound_s([(1.0, 1.0), (1.0, 1.0)], [6.0], depths, num_microbatches)
    hop = [Hop(0.0, 3.0)]
    ends = one_f_one_b_ends(
        [1.0, 1.0],
        [1.0, 1.0],
        depths=depths,
        num_microbatches=num_microbatches,
        forward_hops=hop,
        backward_hops=hop,
    )
    assert bound_s == max(ends) == expected


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data())
def test_no_bound_is_above_the_step(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 5))
    num_microbatches = data.draw(st.integers(1, 12))
    depths = sorted(data.draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)), reverse=True)
    seconds = st.sampled_from([0.0, 1.0, 1.5, 4.0])
    stages = data.draw(st.lists(st.tuples(seconds, seconds), min_size=num_stages, max_size=num_stages))
    hop = st.builds(Hop, seconds, seconds)
    there, back = (data.draw(st.lists(hop, min_size=num_stages - 1, max_size=num_stages - 1)) for _ in range(2))
    ends = one_f_one_b_ends(
        [forward for forward, _ in stages],
        [backward for _, backward in stages],
        depths=depths,
        num_microbatches=num_microbatches,
        forward_hops=there,
        backward_hops=back,
    )
    crossings = [sum(a) + sum(b) for a, b in zip(there, back, strict=True)]
    assert pipeline_bound_s(stages, crossings, tuple(depths), num_microbatches) <= max(ends) + 1e-9
