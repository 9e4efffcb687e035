"""The admission desk: one place per node, fair order, no claim that is stale, foreign or repeated, and nothing lost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.identity import sign_claim
from neuroshard.identity.admissions import (
    ADMISSION_SECONDS,
    DOWNLOAD_RIGHT_SECONDS,
    JOIN,
    MAX_JOIN_BYTES,
    REFRESH,
    AdmissionRevocation,
    JoinClaim,
    PlaceClaim,
    sign_admission_revocation,
)
from neuroshard.identity.claims import NodeIdentity
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite
from neuroshard.membership.run_members import Papers
from neuroshard.organiser.desk import Admitted, Queued
from neuroshard.organiser.refusals import OrganiserError
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.types import LayerRange, RunId
from tests.organiser.desks import AUTHORITY, NAMES, OFFER, OWNER, RUN, START, Desk, admission_in, node, right_in, stages
from tests.worlds.claims import identity_of


def refused(code: str, act: Any, *arguments: Any) -> OrganiserError:
    with pytest.raises(OrganiserError) as caught:
        act(*arguments)
    assert caught.value.code == code, caught.value
    assert caught.value.action
    return caught.value


def in_queue(answer: Admitted | Queued) -> Admitted | Queued:
    """An answer without its right to download, which names the time."""
    return answer.model_copy(update={"download_right": None}) if isinstance(answer, Queued) else answer


def test_the_first_nodes_get_one_stage_each_with_a_signed_admission() -> None:
    desk = Desk()
    answers = [desk.join(number) for number in range(3)]
    found = [admission_in(answer) for answer in answers]
    assert [each.stage for each in found] == list(NAMES)
    assert [each.layers for each in found] == [LayerRange(at, at + 1) for at in range(3)]
    assert [(each.node, each.wallet) for each in found] == [
        (node(number), identity_of(number).wallet_id) for number in range(3)
    ]
    assert [each.serial for each in found] == [1, 2, 3]
    assert {(each.admitted_at, each.expires_at) for each in found} == {(START, START + ADMISSION_SECONDS)}


def test_a_repeated_join_changes_nothing() -> None:
    desk = Desk()
    first, again = desk.join(1), desk.join(1)
    assert first == again
    assert sum(desk.desk.free_places().values()) == 2 + 10
    for number in (2, 3):
        desk.join(number)
    waiting, same = desk.join(4), desk.join(4)
    assert isinstance(waiting, Queued)
    assert waiting == same


def test_the_queue_is_served_in_the_order_of_arrival() -> None:
    desk = Desk()
    desk.join(0)
    desk.now += ADMISSION_SECONDS - 10
    desk.join(1)
    desk.join(2)
    waiting = [desk.join(number) for number in range(3, 6)]
    assert [each.position for each in waiting if isinstance(each, Queued)] == [1, 2, 3]
    desk.now += 11
    newcomer = desk.join(9)
    assert isinstance(newcomer, Queued)  # the free place is that of the first in the queue
    assert [isinstance(desk.poll(each), Admitted) for each in reversed(waiting)] == [False, False, True]
    assert admission_in(desk.poll(waiting[0])).stage == "head-0"
    second, last = desk.poll(waiting[1]), desk.poll(newcomer)
    assert isinstance(second, Queued)
    assert isinstance(last, Queued)
    assert (second.position, last.position) == (1, 3)


def test_a_place_that_was_left_stays_taken_until_its_admission_ends() -> None:
    """Otherwise nodes that join and leave get more valid admissions than the run has places."""
    desk = Desk(places=stages()[:1])
    first = admission_in(desk.join(0))
    desk.now = first.expires_at - 20
    waiting = desk.join(1)
    desk.leave(0)
    refused("no_place", desk.refresh, 0)
    assert isinstance(desk.poll(waiting), Queued)
    desk.now = first.expires_at
    assert isinstance(desk.poll(waiting), Queued)
    desk.now += 1
    assert admission_in(desk.poll(waiting)).node == node(1)


def test_a_node_that_left_comes_back_to_its_place() -> None:
    desk = Desk(places=stages()[:1])
    first = admission_in(desk.join(0))
    desk.leave(0)
    assert admission_in(desk.join(0)) == first
    assert admission_in(desk.refresh(0)) == first
    waiting = desk.join(1)
    desk.leave(1)
    refused("unknown_request", desk.poll, waiting)


def test_a_place_that_was_left_is_not_kept_for_a_return_after_a_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stages()[:1])
    desk.join(0)
    desk.leave(0)
    desk.now += ADMISSION_SECONDS + 1
    desk.again()
    assert admission_in(desk.join(1)).node == node(1)


@pytest.mark.parametrize("reason", ["revoked", "not_in_allowlist"])
@pytest.mark.parametrize("has_place", [False, True])
def test_a_waiting_node_that_may_not_join_any_more_gets_no_place(reason: str, has_place: bool) -> None:
    desk = Desk(places=stages()[:1])
    desk.join(0)
    desk.now += ADMISSION_SECONDS - 10
    waiting = [desk.join(number) for number in (1, 2)]
    desk.now += 11
    if has_place:
        desk.poll(waiting[0])
    if reason == "revoked":
        statement = AdmissionRevocation(RUN, node(1), None, "proof", int(START))
        desk.database.keep_revocation(node(1), sign_admission_revocation(AUTHORITY, statement))
    else:
        desk.database.allow(identity_of(2).wallet_id)
    refused(reason, desk.poll, waiting[0])
    if not has_place:
        assert isinstance(desk.poll(waiting[1]), Queued)
        desk.now += 10
        refused(reason, desk.poll, waiting[0])  # a node that asks in vain is as silent as one that does not ask
        assert isinstance(desk.poll(waiting[1]), Queued)
        desk.now += 10
        assert admission_in(desk.poll(waiting[1])).node == node(2)


def test_a_wallet_with_a_pass_keeps_its_turn_when_a_list_is_made() -> None:
    desk = Desk(places=stages()[:1])
    desk.join(0)
    invitation = invite(OWNER, RUN, InvitationTerms(START + 60, 1, "Ada"), InvitedPlaces("run"), seed=bytes(32))
    waiting = desk.join(1, invitation=invitation.pass_for(key_of(1), START))
    desk.database.allow(identity_of(7).wallet_id)
    assert isinstance(desk.poll(waiting), Queued)


def test_the_queue_has_a_limit_with_a_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.organiser.desk.MOST_WAITING", 2)
    desk = Desk(places=stages()[:1])
    waiting = [desk.join(number) for number in range(3)][1:]
    full = refused("queue_full", desk.join, 3)
    assert (full.status, full.retry_after_seconds) == (503, 60)
    assert full.message == "The queue is full: 2 nodes wait for a place in the run."
    assert desk.join(2) == waiting[1]  # a node that waits asks again
    desk.leave(1)
    assert isinstance(desk.join(3), Queued)


def test_a_poll_reads_the_queue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(places=stages()[:1])
    desk.join(0)
    waiting = desk.join(1)
    reads, read = list[int](), desk.database.queue

    def counted() -> Any:
        reads.append(1)
        return read()

    monkeypatch.setattr(desk.database, "queue", counted)
    desk.poll(waiting)
    assert len(reads) == 1
    desk.desk.waiting()
    assert len(reads) == 1


def test_a_wall_clock_that_jumps_frees_no_place_early_and_drops_nobody_in_the_queue(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stages()[:1])
    desk.join(0)
    desk.now += 1
    desk.again()
    waiting = desk.join(1)
    desk.clock_error = ADMISSION_SECONDS + 60.0  # the network gives the time after the start
    assert isinstance(desk.poll(waiting), Queued)
    desk.clock_error = 0.0
    assert desk.poll(waiting) == waiting


def test_a_small_node_that_fits_no_free_place_holds_up_nobody() -> None:
    small, large = stages(1, 500)[0], stages(1, 3000)[1]
    desk = Desk(places=(small, large))
    desk.join(0)
    waiting = desk.join(1, memory_mb=600)
    assert isinstance(waiting, Queued)
    assert admission_in(desk.join(2)).stage == "body-0"


def test_a_node_that_fits_no_stage_is_refused_at_once() -> None:
    desk = Desk()
    assert "1,000 MB" in refused("no_stage_fits", lambda: desk.join(1, memory_mb=999)).message
    assert admission_in(desk.join(1, memory_mb=999, role="trainer")).layers is None


def test_who_is_silent_for_three_polls_loses_the_place_in_the_queue() -> None:
    desk = Desk()
    for number in range(3):
        desk.join(number)
    first, second = desk.join(3), desk.join(4)
    for _ in range(4):
        desk.now += 10
        answer = desk.poll(second)
    assert isinstance(answer, Queued)
    assert answer.position == 1
    refused("unknown_request", desk.poll, first)


def test_only_the_first_in_the_queue_get_ready() -> None:
    desk = Desk()
    answers = [desk.join(number) for number in range(13)]
    waiting = [each for each in answers if isinstance(each, Queued)]
    assert [each.is_waitlisted for each in waiting] == [False] * 8 + [True] * 2
    assert [each.stage is None for each in waiting] == [False] * 8 + [True] * 2


def test_the_first_of_the_queue_may_download_and_each_poll_renews_the_right() -> None:
    desk = Desk()
    answers = [desk.join(number) for number in range(13)]
    rights = [right_in(each) for each in answers[3:]]
    assert [each is None for each in rights] == [False] * 8 + [True] * 2
    first, me = rights[0], identity_of(3)
    assert first is not None
    assert (first.node, first.wallet, first.stage, first.layers) == (
        me.node_id,
        me.wallet_id,
        "head-0",
        LayerRange(0, 1),
    )
    assert first.expires_at == START + DOWNLOAD_RIGHT_SECONDS
    desk.now += 10
    later = right_in(desk.poll(answers[3]), desk.now)
    assert later is not None
    assert later.expires_at == first.expires_at + 10


def test_free_names_that_leave_and_return_get_no_further_downloads() -> None:
    """Without a list any name may wait. With one, a listed wallet has slots of its own."""
    desk = Desk()
    for number in range(3):
        desk.join(number)
    for number in range(10, 18):
        assert right_in(desk.join(number)) is not None
        desk.leave(number)
    assert right_in(desk.join(18)) is None
    desk.database.allow(identity_of(19).wallet_id)
    desk.leave(18)
    assert right_in(desk.join(19)) is not None


def test_an_admission_is_renewed_at_half_life_and_its_place_is_free_after_its_end() -> None:
    desk = Desk()
    first = admission_in(desk.join(1))
    assert admission_in(desk.refresh(1)) == first  # too early for another one
    desk.now += 1800
    renewed = admission_in(desk.refresh(1))
    assert (renewed.stage, renewed.serial, renewed.expires_at) == (first.stage, 2, first.expires_at + 1800)
    desk.now = renewed.expires_at + 1
    assert desk.desk.free_places()["head-0"] == 0
    assert admission_in(desk.join(2)).stage == "head-0"
    refused("no_place", desk.refresh, 1)


def test_nodes_keep_their_places_after_an_hour_without_the_organiser(tmp_path: Path) -> None:
    """All of them come back at once, and later than their admissions ended. Newcomers wait until they had time."""
    desk = Desk(tmp_path)
    before = [admission_in(desk.join(number)).stage for number in range(3)]
    desk.now += 2 * ADMISSION_SECONDS
    desk.again()
    assert isinstance(desk.join(7), Queued)
    assert [admission_in(desk.refresh(number)).stage for number in range(3)] == before


@pytest.mark.parametrize("ending", ["kill", "close"])
def test_a_new_process_knows_places_queue_and_claims(tmp_path: Path, ending: str) -> None:
    desk = Desk(tmp_path)
    admitted, waiting = [desk.join(number) for number in range(3)], [desk.join(number) for number in (3, 4)]
    repeated = desk.claim(5)
    desk.desk.join(repeated)
    if ending == "close":
        desk.database.close()
    desk.now += 20
    desk.again()
    assert [desk.join(number) for number in range(3)] == admitted
    assert [in_queue(desk.poll(each)) for each in waiting] == [in_queue(each) for each in waiting]
    refused("replayed", desk.desk.join, repeated)


def test_a_claim_counts_once_and_only_near_its_time() -> None:
    desk = Desk()
    claim = desk.claim(1)
    desk.desk.join(claim)
    refused("replayed", desk.desk.join, claim)
    refused("replayed", desk.desk.join, desk.claim(1, at=START - 1))
    refused("expired", desk.desk.join, desk.claim(2, at=START - 301))
    refused("expired", desk.desk.join, desk.claim(2, at=START + 3600))
    desk.desk.join(desk.claim(2, at=START + 299))


def test_a_claim_of_another_run_kind_or_signer_is_refused() -> None:
    desk = Desk()
    refused("other_run", desk.desk.join, desk.claim(1, run=RunId("cd" * 32)))
    refused(
        "bad_signature",
        desk.desk.refresh,
        sign_claim(identity_of(1), JOIN, PlaceClaim(RUN), START).encode()[:-1] + b"x",
    )
    one, two = identity_of(1), identity_of(2)
    mixed = NodeIdentity(one.wallet_id, one.node_id, one.key, one.delegation)
    mixed.key = two.key  # signs for a node whose key it does not have
    refused("bad_signature", desk.desk.join, sign_claim(mixed, JOIN, JoinClaim(RUN, memory_mb=4000), START).encode())
    refused("bad_signature", desk.desk.join, sign_claim(one, REFRESH, JoinClaim(RUN), START).encode())
    refused("too_large", desk.desk.join, bytes(MAX_JOIN_BYTES + 1))
    refused("bad_request", desk.desk.join, b"{}")
    assert desk.desk.refused == Counter(other_run=1, bad_signature=3, too_large=1, bad_request=1)


@pytest.mark.parametrize("facts", [{"name": "n" * 33}, {"device": "d" * 65}, {"addresses": ("a",) * 5}, {"ranks": 0}])
def test_a_value_beyond_its_limit_is_refused(facts: dict[str, Any]) -> None:
    desk = Desk()
    refused("bad_request", lambda: desk.join(1, **facts))


@pytest.mark.parametrize("text", ["'; DROP TABLE places; --", "<script>alert(1)</script>", "%s%n\\0"])
def test_text_of_strangers_is_only_text(text: str) -> None:
    desk = Desk()
    first = desk.join(1, name=text, device=text, release=text)
    assert desk.join(1, name=text) == first
    assert "Choose another name" in refused("already_admitted", lambda: desk.join(2, name=text)).action
    assert admission_in(desk.join(2)).stage == "body-0"


def test_the_allow_list_admits_its_wallets_and_invited_ones() -> None:
    desk = Desk()
    desk.database.allow(identity_of(1).wallet_id)
    desk.join(1)
    refused("not_in_allowlist", desk.join, 2)
    invitation = invite(OWNER, RUN, InvitationTerms(START + 60, 1, "Ada"), InvitedPlaces("run"), seed=bytes(32))
    shown = invitation.pass_for(identity_of(2).delegation.grant.wallet_public_key, START)
    desk.join(2, invitation=shown)
    desk.join(2, invitation=shown)  # shows it again
    other = invitation.pass_for(identity_of(3).delegation.grant.wallet_public_key, START)
    refused("invitation_used_up", lambda: desk.join(3, invitation=other))
    refused("not_in_allowlist", lambda: desk.join(3, invitation=shown))
    refused("not_in_allowlist", lambda: desk.join(3, invitation=b"no pass"))
    desk.now += 400
    refused("not_in_allowlist", lambda: desk.join(3, invitation=other))


def test_a_list_whose_last_wallet_is_denied_admits_nobody() -> None:
    desk = Desk()
    desk.database.disallow(identity_of(1).wallet_id)  # there is no list
    desk.join(2)
    desk.database.allow(identity_of(1).wallet_id)
    desk.database.disallow(identity_of(1).wallet_id)
    assert desk.database.allowed() == frozenset()
    refused("not_in_allowlist", desk.join, 1)
    refused("not_in_allowlist", desk.join, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_owner_ends_the_places_of_an_invitation(tmp_path: Path, restarts: bool) -> None:
    """Neither a claim without the pass helps, nor another wallet that shows one; a new invitation does."""
    desk, stored = Desk(tmp_path), StoredPasses(tmp_path, OFFER)
    places = InvitedPlaces("run")
    invitation = stored.issue(OWNER, InvitationTerms(START + 9000, 2, "Ada"), places)
    desk.join(1, invitation=invitation.pass_for(key_of(1), START))
    desk.now += 1800
    desk.refresh(1)
    stored.revoke(OWNER, "Ada")
    if restarts:
        desk.again()
    refused("revoked", desk.refresh, 1)
    refused("revoked", desk.join, 1)
    refused("revoked", lambda: desk.join(1, invitation=invitation.pass_for(key_of(1), START)))
    refused("revoked", lambda: desk.join(2, invitation=invitation.pass_for(key_of(2), START)))
    again = stored.issue(OWNER, InvitationTerms(START + 9000, 1, "Bo"), places)
    assert admission_in(desk.join(1, invitation=again.pass_for(key_of(1), START))).stage == "head-0"
    (tmp_path / "runs" / "joined" / f"{RUN}.invitations").write_text("damaged")
    refused("revoked", lambda: desk.join(2, invitation=invitation.pass_for(key_of(2), START)))


def test_a_dropped_list_admits_any_wallet_again() -> None:
    desk = Desk()
    desk.database.allow(identity_of(1).wallet_id)
    refused("not_in_allowlist", desk.join, 2)
    desk.database.allow_anyone()
    assert (desk.database.allowed(), desk.desk.has_list()) == (None, False)
    desk.join(2)
    desk.database.allow(identity_of(3).wallet_id)  # a new list, without the wallets of the old one
    refused("not_in_allowlist", desk.join, 1)


def test_names_are_of_one_wallet_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.organiser.database.MOST_NAMES", 2)
    desk = Desk()
    desk.join(1, name="Ada")
    refused("already_admitted", lambda: desk.join(2, name="Ada"))
    for number in (2, 3):
        desk.database.show_name(identity_of(number).wallet_id, f"{number}")  # without a place
    desk.join(4, name="Bo")
    refused("already_admitted", lambda: desk.join(5, name="Ada"))  # a wallet with a place keeps its name
    desk.join(5, name="2")
    refused("already_admitted", lambda: desk.join(6, name="Bo"))


def test_the_owner_ends_the_place_of_a_wallet(tmp_path: Path) -> None:
    desk, stored = Desk(tmp_path), StoredPasses(tmp_path, OFFER)
    invitation = stored.issue(OWNER, InvitationTerms(START + 9000, 2, "Ada"), InvitedPlaces("run"))
    shown = invitation.pass_for(key_of(1), START - 10**8)  # the stored passes are checked with the real clock
    stored.keep_papers(Papers(passes=(shown,)))
    desk.join(1)  # the list is empty, so it needs no pass
    stored.remove(OWNER, identity_of(1).wallet_id)
    refused("revoked", desk.refresh, 1)
    refused("revoked", desk.join, 1)
    desk.join(2)


def key_of(number: int) -> bytes:
    return identity_of(number).delegation.grant.wallet_public_key


def test_a_revoked_node_gets_no_place_and_its_revocation_is_told() -> None:
    desk = Desk()
    desk.join(1)
    statement = AdmissionRevocation(RUN, node(1), None, "proof", int(START))
    desk.database.keep_revocation(node(1), sign_admission_revocation(AUTHORITY, statement))
    refused("revoked", desk.refresh, 1)
    refused("revoked", desk.join, 1)
    told = desk.join(2)
    assert isinstance(told, Admitted)
    assert len(told.revocations) == 1


def test_a_full_disk_stops_joins_and_not_the_members(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.join(1)
    desk.now += 1800
    desk.wait_seconds = 0.0
    desk.again()
    blocker = sqlite3.connect(tmp_path / "organiser.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    renewed = admission_in(desk.refresh(1))
    assert (renewed.stage, renewed.expires_at) == ("head-0", START + 1800 + ADMISSION_SECONDS)
    assert "no node joins" in desk.desk.trouble
    with pytest.raises(sqlite3.OperationalError):
        desk.join(2)
    blocker.execute("ROLLBACK")
    blocker.close()
    assert admission_in(desk.join(2)).stage == "body-0"
    assert desk.desk.trouble == ""


def test_a_page_that_cannot_be_read_stops_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.join(1)
    desk.now += 1800

    def damaged() -> int:
        raise sqlite3.DatabaseError("database disk image is malformed")

    with monkeypatch.context() as patched:
        patched.setattr(desk.database, "next_serial", damaged)
        assert admission_in(desk.refresh(1)).expires_at == desk.now + ADMISSION_SECONDS
    assert "malformed" in desk.desk.trouble
    desk.refresh(1)
    assert desk.desk.trouble == ""


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["join", "leave", "wait", "kill"])), max_size=30))
@settings(max_examples=25, deadline=None)
def test_no_history_gives_a_place_twice(tmp_path_factory: pytest.TempPathFactory, history: list[Any]) -> None:
    desk = Desk(tmp_path_factory.mktemp("organiser"))
    for number, act in history:
        match act:
            case "join":
                desk.join(number)
            case "leave":
                desk.leave(number)
            case "wait":
                desk.now += 20
            case _:
                desk.again()
        taken = desk.database.taken()
        assert all(taken.get(stage.name, 0) <= stage.wanted for stage in desk.places)
        assert sum(taken.values()) <= 8
