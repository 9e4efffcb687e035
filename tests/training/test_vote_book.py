"""What a member of rounds writes down survives its process, and damage is noticed."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from neuroshard.aggregation import TrimmedMean
from neuroshard.compression import Fp32Codec
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Accuse, Complete, VoteRecord
from neuroshard.consensus.round_messages import Phase, Quorum, Vote, signed_by
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import SlicePlan, digest_of
from neuroshard.consensus.vote_log import (
    CONTRIBUTION_FILE,
    KEPT_STEPS,
    KEPT_VOTES,
    LOG_FILE,
    ContributionRecovery,
    FileVoteLog,
    SavedContribution,
)
from neuroshard.errors import StorageError
from tests.worlds.clock import at_once
from tests.worlds.replicas import IDENTITIES, NOW
from tests.worlds.rounds import value_of

HASH = "ab" * 32
AGGREGATE = (b"first slice", b"", b"third")
MEMBERS = tuple(sorted(GroupMember(one.node_id, one.wallet_id) for one in IDENTITIES.values()))[:3]


def quorum(phase: Phase, root: str = HASH) -> Quorum:
    digests = tuple(digest_of(part).hex() for part in AGGREGATE)
    value = value_of(step_id=HASH, root=root, aggregate=digests, members=MEMBERS, sequences=100)
    vote = Vote(HASH, 4, phase, value.digest)
    said = tuple(signed_by(IDENTITIES[member.node_id], vote, NOW) for member in MEMBERS)
    return Quorum(value, 4, phase, said)


RECORD = VoteRecord(HASH, 4, quorum(Phase.PREPARE).value.digest, quorum(Phase.PREPARE), AGGREGATE)


def test_votes_and_locks_are_read_as_they_were_written(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    assert not book.votes()
    plain = replace(RECORD, lock=None, aggregate=())
    for record in (plain, RECORD, replace(RECORD, view=7, prepared="cd" * 32)):
        book.write(record)
        assert FileVoteLog(tmp_path / "rounds").votes()[-1] == record


def test_the_last_steps_are_kept_with_their_aggregates_and_no_more(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    ends = [Complete(quorum(Phase.COMMIT, f"{number:064x}"), AGGREGATE) for number in range(KEPT_STEPS + 3)]
    for number, end in enumerate(ends):
        book.end(number, end)
    again = FileVoteLog(tmp_path / "rounds")
    assert list(again.ended()) == [end.certificate for end in ends[3:]]
    assert [again.aggregate(end.certificate) for end in ends[2:]] == [None, *(end.aggregate for end in ends[3:])]
    assert len(list((tmp_path / "rounds").glob("aggregate-*"))) == KEPT_STEPS
    for number, end in enumerate(ends):  # of smaller ones more are kept
        book.end(number, end, kept=KEPT_STEPS + 2)
    assert len(list((tmp_path / "rounds").glob("aggregate-*"))) == KEPT_STEPS + 2


def test_damaged_votes_are_an_error_and_a_damaged_aggregate_is_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "rounds"
    book = FileVoteLog(folder)
    book.write(RECORD)
    whole = (folder / LOG_FILE).read_bytes()
    (folder / LOG_FILE).write_bytes(b"{}")
    for read in (FileVoteLog(folder).votes, FileVoteLog(folder).ended, partial(FileVoteLog(folder).write, RECORD)):
        with pytest.raises(StorageError, match="damaged, so this node must not vote"):
            read()
    (folder / LOG_FILE).write_bytes(whole)
    (aggregate,) = folder.glob("aggregate-*")
    aggregate.write_bytes(aggregate.read_bytes()[:-1])
    with pytest.raises(StorageError, match="the aggregate is damaged"):
        book.votes()
    aggregate.unlink()
    book.end(1, Complete(quorum(Phase.COMMIT), AGGREGATE))
    (aggregate,) = folder.glob("aggregate-*")
    aggregate.write_bytes(b"x")
    (certificate,) = book.ended()
    assert book.aggregate(certificate) is None


def test_the_aggregate_that_the_votes_are_locked_on_outlives_later_steps(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    book.write(RECORD)
    for number in range(KEPT_STEPS + 1):
        book.end(number, Complete(quorum(Phase.COMMIT, f"{number:064x}"), AGGREGATE))
    assert FileVoteLog(tmp_path / "rounds").votes() == [RECORD]


def test_votes_in_other_steps_are_not_forgotten(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    records = [RECORD, *(VoteRecord(f"{number:064x}", 0, HASH) for number in range(KEPT_VOTES))]
    for record in records:
        book.write(record)
    assert FileVoteLog(tmp_path / "rounds").votes() == records[1:]


def test_the_ends_that_were_written_last_are_kept_whatever_their_numbers(tmp_path: Path) -> None:
    """Who takes another line over may be at a lower number than before."""
    book = FileVoteLog(tmp_path / "rounds")
    ends = [Complete(quorum(Phase.COMMIT, f"{number:064x}"), AGGREGATE) for number in range(KEPT_STEPS + 2)]
    for number, end in zip((40, 41, 42, 43, 44, 12, 13), ends, strict=True):
        book.end(number, end)
    assert list(FileVoteLog(tmp_path / "rounds").ended()) == [end.certificate for end in ends[2:]]


def test_proofs_are_kept_with_the_signed_claims(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    claims = tuple(vote.claim for vote in quorum(Phase.COMMIT).votes[:2])
    for _ in range(2):
        book.keep_proof(Accuse(MEMBERS[0].node_id, "It voted twice.", claims))
    lines = (tmp_path / "rounds" / "proofs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "node": MEMBERS[0].node_id,
            "what": "It voted twice.",
            "claims": [b64encode(claim).decode() for claim in claims],
        }
    ] * 2


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "rounds").write_bytes(b"in the way")
    with pytest.raises(StorageError, match="could not be written"):
        FileVoteLog(tmp_path / "rounds").write(RECORD)


def test_the_newest_contribution_is_kept_and_what_is_damaged_is_none(tmp_path: Path) -> None:
    book = FileVoteLog(tmp_path / "rounds")
    assert book.offer() is None
    offer = SavedContribution(HASH, 120, AGGREGATE)
    book.keep_offer(replace(offer, step_id="cd" * 32))
    book.keep_offer(offer)
    again = FileVoteLog(tmp_path / "rounds")
    assert again.offer() == offer
    path = tmp_path / "rounds" / CONTRIBUTION_FILE
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:-1] + b"x",
        whole.replace(b"\x78", b"\x79", 1),
        b"{}",
        b"\xff",
        b"",
    ):
        path.write_bytes(damaged)
        assert again.offer() is None


def test_a_stored_contribution_is_read_only_if_it_may_be_that_of_the_step(tmp_path: Path) -> None:
    class WatchedVoteLog(FileVoteLog):
        reads = 0

        def offer(self) -> SavedContribution | None:
            self.reads += 1
            return super().offer()

    work = RoundWork(SlicePlan(5), Fp32Codec(), TrimmedMean())
    stored, later = (SavedContribution(step, 120, work.encoded(torch.ones(5))) for step in (HASH, "cd" * 32))
    FileVoteLog(tmp_path / "rounds").keep_offer(stored)
    book = WatchedVoteLog(tmp_path / "rounds")
    recovery = ContributionRecovery(book, at_once)

    async def rounds_after_a_restart() -> None:
        for step in ("cd" * 32, "ef" * 32):
            assert await recovery.sent(step, work) is None
        assert book.reads == 1
        found = await recovery.sent(HASH, work)
        assert found is not None
        assert found.offer == stored
        await recovery.keep(later)
        assert await recovery.sent(HASH, work) is None
        assert book.reads == 2
        assert await recovery.sent(later.step_id, work) is not None

    trio.run(rounds_after_a_restart)


def test_a_contribution_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "rounds").write_bytes(b"")  # a file where the folder should be
    with pytest.raises(StorageError, match="contribution could not be written"):
        FileVoteLog(tmp_path / "rounds").keep_offer(SavedContribution(HASH, 1, AGGREGATE))
