"""The list of those who knock: a few wait, one per minute and host, and only the owner's answer lets them in."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite
from neuroshard.messages import Frame
from neuroshard.runs.knocking import (
    FORGOTTEN_SECONDS,
    MOST_WAITING,
    PAUSE_SECONDS,
    REMEMBERED_SECONDS,
    Knock,
    KnockAnswer,
    KnockList,
    knock_at_all,
)
from neuroshard.types import RunId

RUN = RunId("1" * 64)
OWNER, OTHER, ME = (Wallet.from_secret(TokenSecret("hex", bytes([number] * 32))) for number in (1, 2, 3))


def knock_of(number: int, name: str = "laptop") -> Knock:
    return Knock(RUN, bytes([number] * 32), name)


def test_at_most_three_wait_and_a_repetition_takes_no_further_place() -> None:
    knocks = KnockList()
    for number in range(MOST_WAITING):
        for _ in range(3):
            assert knocks.knock(f"10.0.0.{number}", knock_of(number), 0.0) == KnockAnswer("waiting")
    assert knocks.knock("10.0.0.9", knock_of(9), 0.0) == KnockAnswer("full")
    assert len(knocks.waiting) == MOST_WAITING


def test_a_host_knocks_anew_once_per_minute() -> None:
    knocks = KnockList()
    assert knocks.knock("10.0.0.1", knock_of(1), 0.0).state == "waiting"
    assert knocks.knock("10.0.0.1", knock_of(2), PAUSE_SECONDS - 1).state == "full"  # other wallets do not help
    assert knocks.knock("10.0.0.1", knock_of(2), PAUSE_SECONDS).state == "full"  # the first one still waits
    assert knocks.knock("10.0.0.2", knock_of(2), PAUSE_SECONDS).state == "waiting"
    assert knocks.knock("10.0.0.1", knock_of(3), FORGOTTEN_SECONDS).state == "waiting"


def test_who_stops_knocking_is_forgotten() -> None:
    knocks = KnockList()
    knocks.knock("10.0.0.1", knock_of(1), 0.0)
    knocks.forget(FORGOTTEN_SECONDS)
    assert knocks.waiting == {}


def test_the_owners_answer_is_given_to_that_wallet_only() -> None:
    knocks = KnockList()
    knocks.knock("10.0.0.1", knock_of(1), 0.0)
    knocks.knock("10.0.0.2", knock_of(2), 0.0)
    knocks.answer(bytes([1] * 32), b"pass")
    knocks.answer(bytes([2] * 32), None)
    assert knocks.knock("10.0.0.1", knock_of(1), 1.0) == KnockAnswer("allowed", b"pass")
    assert knocks.knock("10.0.0.1", knock_of(2), 1.0) == KnockAnswer("refused")
    assert knocks.knock("10.0.0.3", knock_of(3), 1.0) == KnockAnswer("waiting")


def test_a_refusal_ends_some_time_after_it_was_heard() -> None:
    """A slip of the owner's hand must not last until the next start."""
    knocks, late = KnockList(), 10_000.0
    knocks.knock("10.0.0.1", knock_of(1), 0.0)
    knocks.answer(bytes([1] * 32), None)
    assert knocks.knock("10.0.0.1", knock_of(1), late).state == "refused"  # it hears the answer, however late it asks
    assert knocks.knock("10.0.0.1", knock_of(1), late + REMEMBERED_SECONDS).state == "waiting"


def pass_of(wallet: Wallet, owner: Wallet = OWNER, run: RunId = RUN) -> bytes:
    invitation = invite(owner, run, InvitationTerms(2e9), InvitedPlaces(""), seed=bytes(32))
    return invitation.pass_for(wallet.public_key, 1e9)


def answer_to(me: Wallet, answers: Mapping[str, KnockAnswer]) -> KnockAnswer | None:
    """What a computer hears when the nodes of its local network answer its knock in this way."""

    async def request(peer: str, _: Frame, **_options: Any) -> Frame:
        await anyio.lowlevel.checkpoint()
        return Frame("run/knock", answers[peer])

    near = [SimpleNamespace(peer=peer, address="/ip4/127.0.0.1/tcp/1") for peer in answers]
    transport = SimpleNamespace(connections=lambda: near, peers=lambda: list(answers), request=request)
    networking = cast("Any", SimpleNamespace(current=SimpleNamespace(transport=transport)))
    knock = Knock(RUN, me.public_key, "laptop")
    return anyio.run(knock_at_all, networking, knock, OWNER.public_key)


@pytest.mark.parametrize(
    "member_pass",
    [None, b"no pass", pass_of(OTHER), pass_of(ME, OTHER), pass_of(ME, run=RunId("2" * 64))],
    ids=["none", "unreadable", "of another wallet", "of another owner", "of another run"],
)
def test_nobody_but_the_owner_lets_a_computer_in(member_pass: bytes | None) -> None:
    """Any node of the local network may answer, and the one of the owner must not be lost among them."""
    liar = KnockAnswer("allowed", member_pass)
    assert answer_to(ME, {"liar": liar}) is None
    assert answer_to(ME, {"liar": liar, "owner": KnockAnswer("waiting")}) == KnockAnswer("waiting")
    allowed = KnockAnswer("allowed", pass_of(ME))
    assert answer_to(ME, {"a liar": liar, "owner": allowed, "other": KnockAnswer("refused")}) == allowed
