"""Tables of scored plans."""

from __future__ import annotations

import math

from benchmarks.peers.report import Row, markdown, printed
from benchmarks.peers.scored import Scored


def scored(planner: str, step_s: float, *, fits: bool = True) -> Scored:
    return Scored(
        planner=planner, plan="2 x 1", step_s=step_s, fits=fits, max_over_mean=1.5, spread=0.75, search_s=0.25
    )


ROWS = [
    Row(profile="one", cluster="c", ours=scored("ours", 2.0), peers=(scored("A", 3.0), scored("B", 1.0, fits=False))),
    Row(profile="two", cluster="c", ours=scored("ours", 2.0), peers=(scored("A", 12.0),)),
    Row(profile="three", cluster="c", ours=None, peers=(scored("A", 3.0),)),
]


def test_ratios_are_of_plans_that_fit() -> None:
    assert [row.ratio("A") for row in ROWS] == [1.5, 6.0, None]
    assert [row.ratio("B") for row in ROWS] == [None, None, None]


def test_tables_say_means_worst_cases_and_what_does_not_fit() -> None:
    text = markdown({"a": ROWS}, ["one on c: ours 2 s, A 1 s"])
    assert f"| A | {math.sqrt(9):.3f} | 1.500 | 6.000 | 3 | 0 | 1.500 | 0.750 | 0.250 | 0.25 |" in text
    assert "| B | nan | nan | nan | 1 | 1 |" in text
    assert "| one | c | 2 x 1 | 2 | 1.500 | – |" in text
    assert "| three | c | nothing fits |  | – | – |" in text
    assert "Ours is slower here:\n- one on c" in text
    assert "Ours is never slower." in markdown({"a": ROWS}, [])
    assert "nothing fits" in printed({"a": ROWS})
