from __future__ import annotations

from typing import Any

import pytest

from lightning_autopipe.core import ConfigurationError
from lightning_autopipe.planner import PipelineSizes, resolve_sizes


@pytest.mark.parametrize(
    ("given", "world_size", "batch_size", "expected"),
    [
        ({}, 1, 8, (1, 1, 4)),
        ({}, 4, 64, (4, 1, 16)),
        ({}, 4, 6, (4, 1, 6)),
        ({"num_stages": 2}, 4, 64, (2, 2, 8)),
        ({"num_stages": 4}, 4, 64, (4, 1, 16)),
        ({"num_replicas": 2}, 8, 64, (4, 2, 16)),
        ({"num_stages": 2, "num_replicas": 2}, 4, 64, (2, 2, 8)),
        ({"num_stages": 4, "num_microbatches": 1}, 4, 64, (4, 1, 1)),
        ({"num_microbatches": 4}, 4, 2, (4, 1, 4)),
    ],
)
def test_what_is_not_given_follows(
    given: dict[str, Any], world_size: int, batch_size: int, expected: tuple[int, int, int]
) -> None:
    num_stages, num_replicas, num_microbatches = expected
    assert resolve_sizes(**given, world_size=world_size, batch_size=batch_size) == PipelineSizes(
        num_stages=num_stages, num_replicas=num_replicas, num_microbatches=num_microbatches
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_stages": 3}, r"num_stages=3 does not divide the 4 processes.* one of 1, 2, 4, or start a multiple of 3"),
        ({"num_replicas": 3}, "num_replicas=3 does not divide the 4 processes"),
        ({"num_stages": 8}, "num_stages=8 does not divide the 4 processes"),
        (
            {"num_stages": 2, "num_replicas": 4},
            "num_stages=2 x num_replicas=4 needs 8 processes, but 4 were started: set the Trainer's devices",
        ),
        ({"num_stages": 0}, 'num_stages must be an integer >= 1 or "auto"; set num_stages on the strategy; got 0'),
        ({"num_stages": "all"}, "num_stages must be .* got 'all'"),
        ({"num_replicas": 1.0}, "num_replicas must be .* got 1.0"),
        ({"num_microbatches": True}, "num_microbatches must be .* got True"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1; got 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_sizes(**({"world_size": 4, "batch_size": 8} | given))
