"""Votes of real replicas under liars, dead seats, full disks, kills, wrong clocks and restored backups."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.stage_chain import FileChainStore
from neuroshard.consensus.vote_log import FileVoteLog
from neuroshard.network import InMemoryNetwork
from tests.worlds.replicas import DUE_SECONDS, EVERYBODY, A, B, C, SimulatedReplica, for_seconds, play
from tests.worlds.rounds import LIARS

D = EVERYBODY[3]
DAY = 86_400.0


def chain_of(replica: SimulatedReplica) -> Chain:
    chain = replica.group.chain.chain
    assert chain is not None
    return chain


def check_one_line(*replicas: SimulatedReplica) -> None:
    """No two of them know different certificates of one height."""
    values = dict[int, str]()
    for certificate in (one for replica in replicas for one in chain_of(replica).recent):
        value = certificate.value
        assert values.setdefault(value.height, value.digest) == value.digest
    assert [one.group.chain.fork for one in replicas] == [None] * len(replicas)


@pytest.mark.parametrize("lie", ["wrong_results", "two_votes", "both_votes", "two_proposals", "no_memory"])
def test_with_one_of_four_voters_away_a_liar_gets_no_second_certificate(lie: str) -> None:
    """The quorum stays three of four. Without the liar's votes the step waits for the voter that is away."""

    async def scenario(network: InMemoryNetwork) -> None:
        names = (A, B, C, D)
        liar, *honest = (
            SimulatedReplica(name, network, seed, seats=names, is_open=True) for seed, name in enumerate(names)
        )
        liar.lie = LIARS[lie]
        away = honest[-1]
        network.suspend(D)
        away.is_idle = True
        await for_seconds(2 * DUE_SECONDS, liar, *honest)
        check_one_line(*honest)
        for one in honest:
            assert all(
                len(each.signers & set(chain_of(one).ledger.committee.members)) >= 3 for each in chain_of(one).recent
            )
        network.wake(D)
        away.is_idle = False
        await until_step(2, honest, liar, *honest)
        check_one_line(*honest)

    play(scenario)


@pytest.mark.parametrize("is_open", [False, True])
def test_twelve_wallets_that_contribute_once_get_no_vote(is_open: bool) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        seats = (A, B, C, D)
        voters, idle = (
            [SimulatedReplica(name, network, seed, seats=seats, is_open=is_open) for seed, name in enumerate(names)]
            for names in (seats, EVERYBODY[4:16])
        )
        await for_seconds(DUE_SECONDS + 8, *voters, *idle)
        assert any(idler.name in chain_of(voters[0]).recent[0].value.accepted for idler in idle)
        for one in idle:
            one.is_idle = True
        network.partition(seats, EVERYBODY[4:16])
        before = [one.state.outer_step for one in idle]
        await for_seconds(2 * DUE_SECONDS, *voters, *idle)
        assert [one.state.outer_step for one in idle] == before
        assert min(one.state.outer_step for one in voters) >= before[0] + 1
        assert [seat.node_id for seat in chain_of(voters[0]).ledger.committee.seats] == list(seats)
        check_one_line(*voters, *idle)

    play(scenario)


async def until_step(outer_step: int, awaited: Sequence[SimulatedReplica], *living: SimulatedReplica) -> None:
    async with anyio.create_task_group() as tasks:
        for replica in living:
            tasks.start_soon(replica.live)
        with anyio.fail_after(300):
            while min(replica.state.outer_step for replica in awaited) < outer_step:
                await anyio.sleep(1)
        tasks.cancel_scope.cancel()


class KilledError(BaseException):
    """The process ends here."""


@contextmanager
def at_write(monkeypatch: pytest.MonkeyPatch, folder: Path, point: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Do `act` at a numbered write to files in this folder: before each flush, and before and after each rename."""
    points = count()
    reached = [0]

    def pass_point() -> None:
        reached[0] = next(points)
        if reached[0] == point:
            act()

    def replaced(source: Any, target: Any) -> None:
        is_here = folder in Path(target).parents
        if is_here:
            pass_point()
        rename(source, target)
        if is_here:
            pass_point()

    def synced(_descriptor: int) -> None:
        pass_point()

    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "replace", replaced)
        yield reached


def on_disk(network: InMemoryNetwork, folder: Path, **fields: Any) -> SimulatedReplica:
    book, store = FileVoteLog(folder), FileChainStore(folder)
    return SimulatedReplica(B, network, 1, book=book, store=store, **fields)


def check_votes(*lives: SimulatedReplica) -> None:
    """One node has voted for one value in each view and phase of a step."""
    said = dict[tuple[str, int, Any], str]()
    for vote in (vote for life in lives for vote in life.votes):
        assert said.setdefault((vote.step_id, vote.view, vote.phase), vote.value) == vote.value


async def live_until_killed(replica: SimulatedReplica) -> None:
    try:
        await replica.live()
    except* KilledError:
        pass


def life_with_a_fault(
    monkeypatch: pytest.MonkeyPatch, folder: Path, point: int, fault: str, clock_ahead: float = 0.0
) -> bool:
    """B meets a fault at one of its writes and goes on, or starts again from its disk. Returns whether it met it."""
    rounds, backup, met = folder / "rounds", folder / "backup", list[bool]()

    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def kill() -> None:
        raise KilledError

    def copy() -> None:
        shutil.copytree(rounds, backup)

    async def scenario(network: InMemoryNetwork) -> None:
        a, c = (SimulatedReplica(name, network, seed) for seed, name in ((0, A), (2, C)))
        first = on_disk(network, rounds)
        lives, before = [first], first.state
        with at_write(monkeypatch, rounds, point, {"full": fill, "kill": kill, "backup": copy}[fault]) as reached:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(a.live)
                tasks.start_soon(c.live)
                tasks.start_soon(live_until_killed, first)
                await anyio.sleep(DUE_SECONDS + 5)
                met.append(reached[0] >= point)
                tasks.cancel_scope.cancel()
        if fault != "full":
            network.kill(B)
            state = first.state
            if backup.exists():
                state = before
                shutil.rmtree(rounds)
                shutil.copytree(backup, rounds)
            lives.append(on_disk(network, rounds, state=state, clock_ahead=clock_ahead))
        await until_step(2, [lives[-1]], a, c, lives[-1])
        check_votes(*lives)
        check_one_line(a, c, *lives)

    play(scenario)
    return met[0]


@pytest.mark.parametrize("fault", ["full", "kill", "backup"])
def test_a_fault_at_any_write_of_a_seat_leads_to_no_second_vote(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes of votes, of the chain and of aggregates: the disk is full, the process ends, or a copy is made there
    and replaces the folder later. The log alone is tried at each of its writes (`test_vote_log_faults.py`)."""
    for point in count(("full", "kill", "backup").index(fault), 3):
        if not life_with_a_fault(monkeypatch, tmp_path / str(point), point, fault):
            break
    assert point > 10


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_a_clock_that_moves_by_a_day_repeats_no_vote(
    shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is killed in the middle of a round and starts again with another time of day."""
    for point in (3, 9):
        assert life_with_a_fault(monkeypatch, tmp_path / str(point), point, "kill", shift)
