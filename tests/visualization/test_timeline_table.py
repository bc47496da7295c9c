from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

from lightning_autopipe.visualization import LinkUse, timeline_table, timeline_text, traffic_table

from .timelines import a_timeline, an_unlike_timeline


def test_every_rank_has_a_row() -> None:
    # Stage 1 is never idle between its first forward, after 10 ms, and its last backward; then come 20 ms on stage 0.
    expected = """
        step 167 ms, bubble 21.6 %

         stage  rank  compute  optimizer   idle  bubble  memory
         ───────────────────────────────────────────────────────
             0     1   120 ms       5 ms  42 ms  25.1 %   1 MiB
             1     0   132 ms       5 ms  30 ms  18.0 %   2 MiB
    """
    assert timeline_text(a_timeline(2, 4, bandwidth_bytes_per_s=None)) == dedent(expected).lstrip()


def test_replicas_and_reductions_have_columns_where_there_are_some() -> None:
    header = [str(column.header) for column in timeline_table(a_timeline(2, 2, 2)).columns]
    assert header == [
        "stage",
        "replica",
        "rank",
        "compute",
        "reduce",
        "optimizer",
        "idle",
        "bubble",
        "memory",
    ]
    header = [str(column.header) for column in timeline_table(a_timeline(2, 2, optimizer_s=0)).columns]
    assert header == ["stage", "rank", "compute", "idle", "bubble", "memory"]


def test_it_fits_a_narrow_terminal_whole() -> None:
    text = timeline_text(a_timeline(2, 2, 2), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_long_tables_are_cut() -> None:
    table = timeline_table(a_timeline(8, 1, 2), max_rows=10)
    assert table.row_count == 10
    assert str(table.caption) == "6 more ranks"


def test_use_of_links() -> None:
    uses = [
        LinkUse(name="[a] → b", num_messages=4, num_bytes=1 << 20, busy_s=0.25, busy_share=0.5),
        LinkUse(name="b → a", num_messages=4, num_bytes=None, busy_s=0.0, busy_share=0.0),
    ]
    table = traffic_table(uses)
    rows = list(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))
    assert rows == [("[a] → b", "4", "1 MiB", "250 ms", "50.0 %"), ("b → a", "4", "?", "0", "0.0 %")]


def test_links_that_flows_share() -> None:
    use = LinkUse(
        name="[a]/switch 0 → network",
        num_messages=None,
        num_bytes=3 << 20,
        summed_bytes=1 << 20,
        busy_s=0.25,
        busy_share=0.5,
        contended_share=0.25,
        contending=tuple(f"{rank}→{rank + 1}" for rank in range(8)),
    )
    table = traffic_table([use, replace(use, summed_bytes=0.0, contended_share=0.0, contending=())])
    header = [str(column.header) for column in table.columns]
    assert header == ["from → to", "bytes", "of sums", "busy", "share", "contended", "by flows"]
    rows = list(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))
    flows = "0→1, 1→2, 2→3, 3→4, 4→5, 5→6 +2"
    assert rows == [
        ("[a]/switch 0 → network", "3 MiB", "1 MiB", "250 ms", "50.0 %", "25.0 %", flows),
        ("[a]/switch 0 → network", "3 MiB", "0 B", "250 ms", "50.0 %", "0.0 %", ""),
    ]
    assert "of sums" not in [str(column.header) for column in traffic_table([replace(use, summed_bytes=0.0)]).columns]


def test_stages_with_unlike_numbers_of_ranks_have_a_row_each() -> None:
    lines = timeline_text(an_unlike_timeline()).splitlines()
    assert [line.split()[:2] for line in lines[4:]] == [["0", "1"], ["0", "2"], ["1", "0"]]
    assert "replica" not in lines[2]
