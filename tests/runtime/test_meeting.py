"""Processes that meet: who does not fit, does not come, or cannot be reached ends the run with a reason, in time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_autopipe.core.errors import AutoPipeError, ConfigurationError, PipelineRuntimeError
from lightning_autopipe.runtime import meeting
from lightning_autopipe.runtime.liveness import ProcessIdentity
from lightning_autopipe.runtime.meeting import meet
from lightning_autopipe.runtime.members import Member, check_members
from tests.harness import describe, run_processes, run_processes_to_end


def member(global_rank: int, **changes: Any) -> Member:
    """One of two processes on one node."""
    known: dict[str, Any] = {
        "world_size": 2,
        "node_rank": 0,
        "local_rank": global_rank,
        "num_nodes": 1,
        "num_devices": 2,
        "backend": "gloo",
    }
    return Member(global_rank=global_rank, **{**known, **changes})


UNLIKE_NODES = [
    member(0, world_size=3, num_nodes=2, num_devices=1),
    member(1, world_size=3, num_nodes=2, node_rank=1, local_rank=0),
    member(2, world_size=3, num_nodes=2, node_rank=1, local_rank=1),
]
ONE_GPU = [member(global_rank, accelerator_id="GPU-1", backend="nccl") for global_rank in range(2)]

MISFITS = {
    r"world size is 3 for global rank 1 .*, but it is 2 for global rank 0": [member(0), member(1, world_size=3)],
    r"run on 2 nodes, but the Trainer's num_nodes is 1 .*: set num_nodes=2": [
        replace(known, num_nodes=1) for known in UNLIKE_NODES
    ],
    r"node 0 have the local ranks \[0, 0\].*NODE_RANK": [member(0), member(1, local_rank=0)],
    r"node 0 the launcher started 2 processes, but the Trainer has 4 devices there: set devices=2": [
        member(global_rank, num_devices=4) for global_rank in range(2)
    ],
    r"num_stages is 4 on global rank 1 .*, but 2 on global rank 0 .*: give .* same options": [
        member(global_rank, settings={"num_stages": text}) for global_rank, text in enumerate(("2", "4"))
    ],
    r"global rank 0 .* and global rank 1 .* one GPU \(GPU-1\).*process_group_backend='gloo'": ONE_GPU,
}


@pytest.mark.parametrize("message", list(MISFITS))
def test_what_does_not_fit_is_told(message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_members(MISFITS[message])


@pytest.mark.parametrize(
    "members",
    [
        UNLIKE_NODES,
        [replace(one, backend="gloo") for one in ONE_GPU],
        [replace(one, accelerator_id=f"GPU-{one.global_rank}", num_devices=1) for one in ONE_GPU],
    ],
    ids=["unlike nodes", "one GPU over gloo", "each process sees one GPU"],
)
def test_what_fits(members: list[Member]) -> None:
    check_members(members)


def end_after_all_but_one_came(hall: Any, deadline: float) -> None:
    while len(hall.missing()) > 1:
        time.sleep(0.1)
    os._exit(3)


def come_last(members: list[Member], timeout_s: float) -> str:
    """Global rank 0 comes when everybody else is there, in the launcher's store."""
    if os.environ["RANK"] == "0":
        time.sleep(1.5)
    return meet_here(members, timeout_s)


def meet_here(members: list[Member], timeout_s: float, dies: int | None = None) -> str:
    own = replace(members[int(os.environ["RANK"])], process=os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    if dies == own.global_rank:
        meeting._Hall.wait_for_all = end_after_all_but_one_came
    try:
        meet(own, address="127.0.0.1", port=port, timeout_s=timeout_s, launched_by="a test")
    except AutoPipeError as error:
        return f"{type(error).__name__}: {error}"
    time.sleep(0.5)  # rank 0 may hold the store
    return "met"


def test_unlike_nodes_meet() -> None:
    assert run_processes(3, meet_here, UNLIKE_NODES, 20.0, initialize_process_group=False) == ["met"] * 3


AT_LAUNCHER, AT_RANK_0 = {}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.fixture
def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def meet_in_vain(members: list[Member], timeout_s: float, environment: dict[str, str], free_port: str) -> list[str]:
    """What every process says, whoever holds the store."""
    at_rank_0 = environment == AT_RANK_0
    results: list[str] = run_processes(
        len(members),
        meet_at if at_rank_0 else meet_here,
        members,
        timeout_s,
        *([int(free_port)] if at_rank_0 else []),
        initialize_process_group=False,
        environment=environment,
    )
    return results


def meet_at(members: list[Member], timeout_s: float, port: int, dies: int | None = None) -> str:
    os.environ["MASTER_PORT"] = str(port)
    if os.environ["RANK"] != "0":
        meeting._LOOK_INTERVAL_S = 0.5  # so that whoever holds the store has to wait for them
    return meet_here(members, timeout_s, dies)


@pytest.mark.parametrize("environment", [AT_LAUNCHER, AT_RANK_0], ids=["store at launcher", "store at rank 0"])
def test_who_does_not_come_is_named_on_every_rank(environment: dict[str, str], free_port: str) -> None:
    for said in meet_in_vain(UNLIKE_NODES[:2], 1.0, environment, free_port):
        assert "waited 1 s (timeout) at 127.0.0.1:" in said
        assert "for global ranks [2] of 3, which did not come" in said
        assert "global rank 0 (node 0, local rank 0" in said
        assert "global rank 1 (node 1, local rank 0" in said
        assert "rank comes from a test" in said


@pytest.mark.parametrize("environment", [AT_LAUNCHER, AT_RANK_0], ids=["store at launcher", "store at rank 0"])
def test_two_processes_of_one_rank_end_all(environment: dict[str, str], free_port: str) -> None:
    members = [UNLIKE_NODES[0], UNLIKE_NODES[1], UNLIKE_NODES[1]]
    for said in meet_in_vain(members, 300.0, environment, free_port):
        assert "two processes have global rank 1" in said
        assert "RANK" in said


def test_two_processes_of_one_rank_wait_for_rank_0_to_tell_it() -> None:
    members = [UNLIKE_NODES[0], UNLIKE_NODES[1], UNLIKE_NODES[1]]
    for said in run_processes(3, come_last, members, 300.0, initialize_process_group=False):
        assert "two processes have global rank 1" in said


@pytest.mark.parametrize("environment", [AT_LAUNCHER, AT_RANK_0], ids=["store at launcher", "store at rank 0"])
def test_world_sizes_that_differ_end_who_waits(environment: dict[str, str], free_port: str) -> None:
    members = [member(0, world_size=3), member(1)]
    for said in meet_in_vain(members, 300.0, environment, free_port):
        assert "world size is 2 for global rank 1" in said
        assert "it is 3 for global rank 0" in said


def test_the_end_of_rank_0_ends_who_waits(free_port: str) -> None:
    outcomes = run_processes_to_end(
        2,
        meet_at,
        UNLIKE_NODES,
        30.0,
        int(free_port),
        0,
        initialize_process_group=False,
        environment=AT_RANK_0,
        timeout_s=30,
    )
    assert [outcome.exit_code for outcome in outcomes] == [3, 0], describe(outcomes)
    assert "held by global rank 0 or the launcher, went away" in outcomes[1].value


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts and never answers, as another program's may."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_told_by_both_sides(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(PipelineRuntimeError, match=rf"cannot open the run's store at 127.0.0.1:{silent_port}.*in use"):
        meet(member(0), address="127.0.0.1", port=silent_port, timeout_s=5, launched_by="a test")
    with pytest.raises(PipelineRuntimeError, match=r"does not answer .* MASTER_PORT to a free one"):
        meet(member(1), address="127.0.0.1", port=silent_port, timeout_s=1, launched_by="a test")


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_where_nobody_listens(address: str, free_port: str) -> None:
    with pytest.raises(PipelineRuntimeError, match=rf"global rank 1 .* waited 0.5 s .* at {address}:{free_port}"):
        meet(member(1), address=address, port=int(free_port), timeout_s=0.5, launched_by="a test")


ENDED = ProcessIdentity(machine=ProcessIdentity.of_this_process().machine, pid=2**30, start_ticks=0)


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_those_of_an_earlier_start_are_not_taken_for_this_one(num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts processes again keeps its store; rank 0 comes last here."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    before = [member(rank, world_size=num_before, identity=ENDED, process="before") for rank in range(num_before)]
    halls = [meeting._Hall(store, one, is_host=False) for one in before]
    for hall in halls:
        hall.enter()
    assert all(hall.wait_for_all(0.0) == before for hall in halls)

    now = [member(rank, process=str(rank)) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        met = []
        for one in reversed(now):
            met.append(
                threads.submit(meet, one, address="127.0.0.1", port=store.port, timeout_s=20, launched_by="a test")
            )
            time.sleep(0.3)
        stores = [found.result() for found in met]
    stores[0].set("said", "by one of them")
    assert stores[1].get("said") == b"by one of them"
    assert not halls[0].store_of_round.check(["said"])
