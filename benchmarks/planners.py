"""Plans of public planners' objectives against ours, on their own profiles, all scored by the one simulator.

Table (a): a given number of stages with equally many replicas each, 1F1B with plain depths, the same micro-batches.
Ours is not begun from the others' plans. With --check it must not be slower than any plan that fits the memory.
Table (b): PipeDream, Piper and DAPPLE choose stages and the devices of each, in unlike numbers; so does ours.
Table (c): what ours gains by what it alone has: depths, unlike numbers of devices, sizes and slices.

The profiles are those of `benchmarks/profiles`; the objectives are written anew in `benchmarks/peers`.

Run: python benchmarks/planners.py [--check] [--quick] [--json FILE] [--markdown FILE]   (about ten minutes; quick: one)
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks import unlike_devices
from benchmarks.peers.case import Case
from benchmarks.peers.report import Row, markdown, printed
from benchmarks.peers.scored import Scored
from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.cluster import find_cluster_file, load_topology, synthetic_cluster
from lightning_autopipe.core import ClusterTopology
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.profile_files import load_profile

PROFILES = Path(__file__).parent / "profiles"
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster and the numbers of stages that are planned for it."""

    topology: ClusterTopology
    num_stages: tuple[int, ...]
    is_quick: bool = False


def the_clusters() -> dict[str, Cluster]:
    def example(name: str, *num_stages: int, is_quick: bool = False) -> Cluster:
        return Cluster(topology=load_topology(find_cluster_file(name)), num_stages=num_stages, is_quick=is_quick)

    return {
        "no_peer_access_4": example("no_peer_access_4", 4, 2, is_quick=True),
        "slow_network": example("slow_network", 4, 2),
        "uneven_1_2_1": example("uneven_1_2_1", 4, 2, is_quick=True),
        "rtx4090_8": example("rtx4090_8", 8, 4, 2),
        "synthetic, 2 x 4": Cluster(
            topology=synthetic_cluster(2, devices_per_server=4, seed=3), num_stages=(8, 4, 2), is_quick=True
        ),
        "rtx3090_v100": example("rtx3090_v100", 12, 4, 2),
        "nvlink_2x8": example("nvlink_2x8", 16, 4, 2),
        "synthetic, 2 x 8": Cluster(topology=synthetic_cluster(2, devices_per_server=8, seed=1), num_stages=(16, 4, 2)),
    }


SEARCHED = ("slow_network", "rtx4090_8")
"""Clusters of table (c)."""
QUICK_PROFILES = ("dapple-bert-24-pbs-6", "pipedream-vgg16", "piper-bert32a100")


def the_cases(*, is_quick: bool) -> Iterator[tuple[str, str, Cluster, Case]]:
    for path in sorted(PROFILES.glob("*.json")):
        if is_quick and path.stem not in QUICK_PROFILES:
            continue
        profile = load_profile(path)
        for name, cluster in the_clusters().items():
            if cluster.is_quick or not is_quick:
                yield path.stem, name, cluster, Case(profile, cluster.topology)


def restricted(case: Case, cluster: Cluster, profile: str, name: str) -> Iterator[Row]:
    """Rows of table (a); where memory decides, also those without its limits."""
    roomy = Case(case.profile, _roomy(cluster.topology))
    for num_stages in cluster.num_stages:
        if num_stages > case.profile.num_layers:
            continue
        row = Row(profile=profile, cluster=name, ours=case.ours(num_stages), peers=tuple(case.peers(num_stages)))
        yield row
        if row.ours is None or not all(peer.fits for peer in row.peers):
            peers = tuple(roomy.peers(num_stages))
            yield Row(profile=profile, cluster=f"{name}, roomy", ours=roomy.ours(num_stages), peers=peers)


def _roomy(topology: ClusterTopology) -> ClusterTopology:
    return replace(topology, devices=tuple(replace(device, memory_bytes=1 << 50) for device in topology.devices))


def unrestricted(case: Case, profile: str, name: str) -> Row:
    """A row of table (b)."""
    return Row(profile=profile, cluster=name, ours=case.ours_unrestricted(), peers=tuple(case.unrestricted_peers()))


def gains(case: Case, row: Row, profile: str, name: str) -> Row | None:
    """A row of table (c): ours with more and more that it may choose, each against the best plain pipeline."""
    pipelines = [number for number in case.layouts() if number > 1 and case.ours(number) is not None]
    if not pipelines or row.ours is None:
        return None
    best = min(pipelines, key=lambda number: _step_s(case.ours(number)))
    plain = case.ours(best)
    found = {
        "depths": case.ours_searched(best, has_halves=False),
        "sizes, slices": case.ours_searched(best, has_halves=True),
        "any counts": row.ours,
    }
    named = (_renamed(scored, label) for label, scored in found.items() if scored is not None)
    return Row(profile=profile, cluster=name, ours=plain, peers=tuple(named))


def _step_s(scored: Scored | None) -> float:
    assert scored is not None, "only layouts that fit"
    return scored.step_s


def _renamed(scored: Scored, planner: str) -> Scored:
    return Scored(**{**asdict(scored), "planner": planner})


def shortfalls(rows: list[Row]) -> list[str]:
    """Where ours is slower than a peer's plan that fits, or finds none where a peer does."""
    found = []
    for row in rows:
        for peer in row.peers:
            where = f"{row.profile} on {row.cluster}, {peer.plan}"
            if not peer.fits:
                continue
            if row.ours is None:
                found.append(f"{where}: ours found nothing that fits, {peer.planner} did")
            elif row.ours.step_s > peer.step_s * (1 + SAME):
                found.append(
                    f"{where}: ours {row.ours.step_s:.6g} s, {peer.planner} {peer.step_s:.6g} s "
                    f"({peer.ratio_to(row.ours):.4f} of ours)"
                )
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="three profiles on small clusters")
    made.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = made.parse_args()
    tables: dict[str, list[Row]] = {"a": [], "b": [], "c": []}
    for profile, name, cluster, case in the_cases(is_quick=options.quick):
        rows = list(restricted(case, cluster, profile, name))
        tables["a"] += rows
        tables["b"].append(unrestricted(case, profile, name))
        if name in SEARCHED and (row := gains(case, tables["b"][-1], profile, name)) is not None:
            tables["c"].append(row)
        print(f"{profile} on {name}", *shortfalls(rows), sep="\n    ", flush=True)
    print(printed(tables))
    found = shortfalls(tables["a"])
    if options.markdown:
        unlike = unlike_devices.markdown(unlike_devices.eight_devices())
        write_whole(options.markdown, f"{markdown(tables, found)}\n{unlike}")
    figures = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    return finish(options, {**environment(), **figures}, found)


if __name__ == "__main__":
    sys.exit(main())
