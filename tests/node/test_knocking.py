"""The list of those who knock: a few wait, one per minute and host, and only the owner's answer lets them in."""

from __future__ import annotations

from neuroshard.runs.knocking import (
    FORGOTTEN_SECONDS,
    MOST_WAITING,
    PAUSE_SECONDS,
    REMEMBERED_SECONDS,
    Knock,
    KnockAnswer,
    KnockList,
)

RUN = "1" * 64


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
