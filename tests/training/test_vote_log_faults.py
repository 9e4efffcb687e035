"""The vote log forgets no vote that may have left: whatever the clock, the disk or a kill does."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from neuroshard.consensus.chain import LogStart
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Complete, GiveUp, Persist, Say, VoteRecord
from neuroshard.consensus.round_messages import (
    CertificateSaid,
    Message,
    NewView,
    NewViewSaid,
    Phase,
    Quorum,
    Vote,
    VoteSaid,
)
from neuroshard.consensus.slices import digest_of
from neuroshard.consensus.vote_log import (
    COUNT_FILE,
    KEPT_VOTES,
    LOG_FILE,
    OLD_LOG,
    FileVoteLog,
    InMemoryVoteLog,
    VoteLog,
)
from neuroshard.errors import StorageError
from neuroshard.types import NodeId, WalletId
from tests.worlds.rounds import World, signed_as, value_of

DAY = 86_400
HASH = "ab" * 32
AGGREGATE = (b"first slice", b"second")
Operation = Callable[[VoteLog], None]
State = tuple[LogStart | None, Sequence[VoteRecord], Sequence[Quorum]]


def vote(number: int, view: int = 0) -> VoteRecord:
    return VoteRecord(f"{number:064x}", view, HASH)


def quorum(phase: Phase, root: int) -> Quorum:
    digests = tuple(digest_of(part).hex() for part in AGGREGATE)
    members = (GroupMember(NodeId("a"), WalletId("a")),)
    return Quorum(value_of(root=f"{root:064x}", aggregate=digests, members=members), 0, phase, ())


def locked(number: int, view: int) -> VoteRecord:
    return replace(vote(number, view), lock=quorum(Phase.PREPARE, number), aggregate=AGGREGATE)


def write(record: VoteRecord) -> Operation:
    return lambda book: book.write(record)


def end(number: int) -> Operation:
    return lambda book: book.end(number, Complete(quorum(Phase.COMMIT, number), AGGREGATE), 2)


OPERATIONS: Sequence[Operation] = [
    lambda book: book.begin(LogStart(0, 5)),
    write(vote(1)),
    write(locked(1, 0)),
    end(7),
    write(vote(2)),
    write(vote(2, 1)),
    write(locked(2, 1)),
    end(8),
    end(3),  # a line at an earlier step was adopted
    write(vote(3)),
    write(vote(2, 5)),  # back in an earlier step
]


def states() -> list[State]:
    """What must be in the log before the first operation, and after each."""
    book = InMemoryVoteLog()
    found = [state_of(book)]
    for operation in OPERATIONS:
        operation(book)
        found.append(state_of(book))
    return found


def state_of(book: VoteLog) -> State:
    return book.start(), list(book.votes()), list(book.ended())


def opened(folder: Path) -> FileVoteLog:
    """The log as a process that starts finds it. It is written again after every few records."""
    return FileVoteLog(folder, spare_bytes=0)


@contextmanager
def faults(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> Iterator[Iterator[int]]:
    """Do `act` at a numbered point: there is one before and after each flush and each replacement of a file.

    Yields the counter of the points. No flush is made: the files outlive the process anyway, and it takes long.
    """
    points = count()

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            if next(points) == at:
                act()
            result = function(*arguments)
            if next(points) == at:
                act()
            return result

        return inner

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", wrapped(lambda _descriptor: None))
        patch.setattr(os, "replace", wrapped(os.replace))
        yield points


def killed_at(monkeypatch: pytest.MonkeyPatch, folder: Path, point: int) -> tuple[int, bool]:
    """How many operations a process has completed when it is killed at this point, and whether it was."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with faults(monkeypatch, point, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                book = opened(folder)
                for operation in OPERATIONS:
                    operation(book)
                    os.write(writer, b".")  # now the vote leaves
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(process, 0)
    completed = len(os.read(reader, 100))
    os.close(reader)
    return completed, os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_between_any_two_writes_loses_no_vote_that_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = states()
    for point in count():
        folder = tmp_path / str(point)
        completed, was_killed = killed_at(monkeypatch, folder, point)
        if not was_killed:
            break
        assert state_of(opened(folder)) in expected[completed : completed + 2], point
        OPERATIONS[completed](opened(folder))
        assert state_of(opened(folder)) == expected[completed + 1]
    assert completed == len(OPERATIONS)
    assert point > 100


def test_a_full_disk_at_any_write_is_an_error_and_the_write_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected, refused = states(), list[str]()
    for point in count():
        folder = tmp_path / str(point)
        book = opened(folder)
        with faults(monkeypatch, point, fill) as points:
            for number, operation in enumerate(OPERATIONS):
                try:
                    operation(book)
                except StorageError as error:
                    refused.append(error.message)
                    assert state_of(opened(folder)) in expected[number : number + 2]
                    operation(book)
        assert state_of(book) == state_of(opened(folder)) == expected[-1], point
        if next(points) <= point:
            break
    assert len(refused) > 50
    assert all("could not be written" in message for message in refused)


def test_a_record_of_which_a_part_was_written_never_left_and_is_replaced(tmp_path: Path) -> None:
    folder, expected = tmp_path / "rounds", states()
    (log, counted) = folder / LOG_FILE, folder / COUNT_FILE
    book = FileVoteLog(folder)
    OPERATIONS[0](book)
    for number, operation in enumerate(OPERATIONS[1:], 1):
        before, count_before = log.read_bytes(), counted.read_bytes()
        operation(book)
        after, count_after = log.read_bytes(), counted.read_bytes()
        assert after.startswith(before)
        for cut in (*range(len(before), len(after), 97), len(after) - 1):
            other = bytes([after[cut] ^ 0xFF])  # the same byte could make the record whole
            for junk in (b"", other + b"\0" * 5000, other + os.urandom(200)):
                log.write_bytes(after[:cut] + junk)
                counted.write_bytes(count_before)
                assert state_of(FileVoteLog(folder)) == expected[number]
                counted.write_bytes(count_after)  # the same bytes after the vote left are damage
                with pytest.raises(StorageError, match="damaged, so this node must not vote"):
                    FileVoteLog(folder).votes()
        log.write_bytes(after[: len(before) + 3])
        counted.write_bytes(count_before)
        operation(again := FileVoteLog(folder))
        assert state_of(again) == state_of(FileVoteLog(folder)) == expected[number + 1]
        assert log.read_bytes() == after


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of all operations."""
    folder = tmp_path_factory.mktemp("log") / "rounds"
    book = FileVoteLog(folder)
    for operation in OPERATIONS:
        operation(book)
    return folder


@given(data=st.data())
def test_a_flipped_bit_or_a_missing_end_is_damage(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([LOG_FILE, COUNT_FILE]))
    content = (whole / name).read_bytes()
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        bits = bytearray(content)
        bits[place // 8] ^= 1 << place % 8
        spoilt = bytes(bits)
    else:
        spoilt = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        (whole / name).write_bytes(spoilt)
        with pytest.raises(StorageError, match="damaged, so this node must not vote"):
            FileVoteLog(whole).votes()
        with pytest.raises(StorageError, match="damaged"):
            FileVoteLog(whole).write(vote(9))
        assert (whole / name).read_bytes() == spoilt  # nothing is repaired by forgetting
    finally:
        (whole / name).write_bytes(content)


@pytest.mark.parametrize("name", [LOG_FILE, COUNT_FILE])
def test_a_missing_file_is_damage(whole: Path, name: str) -> None:
    (whole / name).rename(whole / "aside")
    try:
        with pytest.raises(StorageError, match="must not vote"):
            FileVoteLog(whole).votes()
    finally:
        (whole / "aside").rename(whole / name)


def shift_times(folder: Path, seconds: int) -> None:
    """As if all files had been written by a clock that was wrong by this much."""
    for path in folder.iterdir():
        status = path.stat()
        os.utime(path, (status.st_atime + seconds, status.st_mtime + seconds))


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_a_clock_set_back_or_forward_by_a_day_deletes_nothing(tmp_path: Path, shift: int) -> None:
    folder = tmp_path / "rounds"
    for number in range(2 * KEPT_VOTES):
        opened(folder).write(vote(number))
        opened(folder).end(number, Complete(quorum(Phase.COMMIT, number), AGGREGATE))
        shift_times(folder, shift)  # NTP now sets the clock right
        _, votes, ended = state_of(opened(folder))
        assert votes == [vote(one) for one in range(max(0, number + 1 - KEPT_VOTES), number + 1)]
        assert [one.value.root for one in ended] == [f"{one:064x}" for one in range(max(0, number - 4), number + 1)]


def test_a_log_of_an_earlier_program_has_all_votes(tmp_path: Path) -> None:
    assert opened(tmp_path).start() is None
    opened(tmp_path).write(vote(1))
    assert opened(tmp_path).start() == OLD_LOG < (0, 0)


def test_the_log_stays_short(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path, spare_bytes=5_000)
    for number in range(500):
        book.write(vote(number // 3, number % 3))
        assert (tmp_path / LOG_FILE).stat().st_size < 10_000
    kept = [*(vote(number, 2) for number in range(167 - KEPT_VOTES, 166)), vote(166, 1)]
    assert book.votes() == FileVoteLog(tmp_path).votes() == kept


def test_an_old_copy_of_the_log_is_noticed_when_the_node_sees_a_vote_that_it_has_forgotten(tmp_path: Path) -> None:
    world = World("abc")
    node = world.proposer(0)
    world.start_all()
    (machine,) = world.nodes[node].machines.values()
    step, own = machine.setting.step, machine.setting.member
    book = FileVoteLog(tmp_path / "rounds")
    book.write(VoteRecord(step.id, 0, HASH))
    shutil.copytree(tmp_path / "rounds", tmp_path / "backup")
    book.write(VoteRecord(step.id, 3, HASH))
    shutil.rmtree(tmp_path / "rounds")
    shutil.copytree(tmp_path / "backup", tmp_path / "rounds")
    (old,) = FileVoteLog(tmp_path / "rounds").votes()  # it is intact, so only its own later vote can show its age
    assert old.view == 0
    other = next(member for member in step.committee.members if member != own)

    def hears(record: VoteRecord, body: Vote) -> list[object]:
        """What the machine does about this vote, by whichever message it comes."""
        found = list[object]()
        value = structs.replace(
            step.first_value(), round_id=HASH, aggregate=(HASH,) * 3, members=tuple(sorted(step.committee.members))
        )
        said = Quorum(value, body.view, body.phase, (signed_as(own, body), signed_as(other, body)))
        messages: list[Message] = [
            VoteSaid(signed_as(own, body)),
            CertificateSaid(said),
            NewViewSaid(signed_as(other, NewView(step.id, 1, ())), said),
        ]
        for message in messages:
            restored = type(machine)(machine.setting, record)
            effects = restored.hear(other.node_id, message, 0.0)
            found.append([type(effect) for effect in effects if isinstance(effect, Persist | GiveUp)])
        return found

    known = [Vote(step.id, 0, Phase.PREPARE, HASH), Vote("0" * 64, 9, Phase.PREPARE, HASH)]
    lost = [
        Vote(step.id, 3, Phase.PREPARE, HASH),
        Vote(step.id, 0, Phase.PREPARE, "cd" * 32),
        Vote(step.id, 0, Phase.COMMIT, HASH),
    ]
    assert [hears(old, body) for body in known] == [[[], [], []]] * 2
    assert [hears(old, body) for body in lost] == [[[Persist, GiveUp]] * 3] * 3
    warned = type(machine)(machine.setting, old)
    effects = warned.hear(other.node_id, VoteSaid(signed_as(own, lost[0])), 0.0)
    (kept,) = [effect.record for effect in effects if isinstance(effect, Persist)]
    FileVoteLog(tmp_path / "rounds").write(kept)
    assert FileVoteLog(tmp_path / "rounds").votes() == [kept]
    assert not warned.hear(other.node_id, VoteSaid(signed_as(own, lost[1])), 0.0)  # it is said once


def test_a_voter_that_has_forgotten_votes_does_not_vote_and_the_others_end_the_step() -> None:
    world = World("abcd")
    node = world.proposer(1)
    world.start_all()
    (machine,) = world.nodes[node].machines.values()
    step, own = machine.setting.step, machine.setting.member
    effects = machine.hear(own.node_id, VoteSaid(signed_as(own, Vote(step.id, 5, Phase.COMMIT, HASH))), 0.0)
    assert [type(effect) for effect in effects] == [Persist, GiveUp]
    assert world.settle()
    votes = [effect for effect in machine.tick(1e6) if isinstance(effect, Say) and isinstance(effect.message, VoteSaid)]
    assert not votes
    world.check_safety()
    assert machine.voting.completed is not None
    assert own not in {vote.member for vote in machine.voting.completed.certificate.votes}
