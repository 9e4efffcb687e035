"""Orders between the machines of one wallet: who is refused, before which check, and which of two orders counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from neuroshard.decoders import msgpack_decoder
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Signed, Signer, TokenSecret, Wallet
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS, DelegationGrant, sign_message
from neuroshard.membership.machine_orders import (
    ANSWER_LIMITS,
    MACHINE_KIND,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    REQUEST_LIMITS,
    MachineAnswer,
    MachineOrder,
    MachineRequest,
    OrderMark,
    WalletOrders,
)
from neuroshard.messages import Frame, FrameLimits, FrameTooLargeError, MalformedFrameError, as_received, encode
from neuroshard.network import RequestRefusedError
from neuroshard.status.machines import machine_status
from neuroshard.types import NodeId
from tests.worlds.statuses import training_status

NOW = 1_800_000_000.0
DAY = 86_400.0
FORGED = bytes(64)
FIRST = OrderMark(0, "")


def wallet_of(number: int) -> Wallet:
    return Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))


def machine(number: int, wallet: int = 0, until: float = NOW + DAY) -> NodeIdentity:
    key, owner = NodeKey.from_seed((number + 1).to_bytes(32, "little")), wallet_of(wallet)
    return NodeIdentity(owner.wallet_id, key.node_id, key, Delegation.issue(owner, key.public_key, until))


def orders_of(number: int, wallet: int = 0, newest: OrderMark = FIRST) -> WalletOrders:
    return WalletOrders(wallet_of(wallet), machine(number, wallet), newest)


HERE, LAPTOP, STRANGER = machine(0), machine(1), machine(9, wallet=9)
PAUSE = MachineOrder("pause", 7, NOW, LAPTOP.node_id, HERE.node_id)


def request_of(order: MachineOrder = PAUSE, by: Signer | None = None, sender: NodeIdentity = LAPTOP) -> MachineRequest:
    return MachineRequest(sender.delegation.signed, sign_message(by or wallet_of(0), MACHINE_KIND, order))


def refusal_of(request: MachineRequest, sender: NodeId = LAPTOP.node_id) -> str:
    with pytest.raises(RequestRefusedError) as refused:
        orders_of(0).check(sender, request, NOW)
    return refused.value.message


def test_a_machine_of_the_wallet_is_heard() -> None:
    request = orders_of(1).request("pause", HERE.node_id, 7, NOW)
    assert orders_of(0).check(LAPTOP.node_id, request, NOW) == PAUSE


def test_a_stranger_is_refused_before_any_signature_is_verified() -> None:
    """Nothing else in its request is read: neither the delegation's signature nor the order can be valid here."""
    delegation = Signed[DelegationGrant](STRANGER.delegation.signed.body, FORGED)
    nonsense = MachineRequest(delegation, Signed[MachineOrder](b"no order", FORGED))
    assert "own wallet only" in refusal_of(nonsense, STRANGER.node_id)


def test_a_stranger_that_names_this_wallet_fails_at_the_delegation() -> None:
    grant = DelegationGrant(STRANGER.key.public_key, wallet_of(0).public_key, int(NOW + DAY))
    for delegation in (
        Signed[DelegationGrant](msgspec.msgpack.encode(grant), FORGED),
        sign_message(wallet_of(9), "delegation", grant),
        sign_message(STRANGER.key, "delegation", grant),
    ):
        nonsense = MachineRequest(delegation, Signed[MachineOrder](b"no order", FORGED))
        assert refusal_of(nonsense, STRANGER.node_id).startswith("The delegation is not valid")


def test_what_another_node_sends_in_the_name_of_a_machine_is_refused() -> None:
    """It may have copied the whole request, or the order into a request of its own."""
    assert "another node" in refusal_of(request_of(), STRANGER.node_id)
    copied = MachineRequest(machine(2).delegation.signed, request_of().order)
    assert "another node has sent it" in refusal_of(copied, machine(2).node_id)


def test_an_order_for_another_machine_or_wallet_is_refused() -> None:
    elsewhere = structs.replace(PAUSE, receiver=machine(2).node_id)
    assert "for another node" in refusal_of(request_of(elsewhere))
    assert "not one of this wallet" in refusal_of(request_of(by=wallet_of(9)))
    assert "own wallet only" in refusal_of(request_of(by=wallet_of(9), sender=machine(1, wallet=9)))


def test_a_stolen_node_key_gives_no_orders() -> None:
    assert "not one of this wallet" in refusal_of(request_of(by=LAPTOP.key))


def test_an_expired_delegation_and_another_time_are_refused() -> None:
    assert "expired" in refusal_of(request_of(sender=machine(1, until=NOW)))
    for time in (NOW - MAX_CLOCK_SKEW_SECONDS - 1, NOW + MAX_CLOCK_SKEW_SECONDS + 1):
        assert "clocks" in refusal_of(request_of(structs.replace(PAUSE, time=time)))
    near = structs.replace(PAUSE, time=NOW - MAX_CLOCK_SKEW_SECONDS + 1)
    assert orders_of(0).check(LAPTOP.node_id, request_of(near), NOW) == near


class Anything(msgspec.Struct, frozen=True, array_like=True):
    """Fields of an order without their bounds."""

    kind: Any = "pause"
    number: Any = 7
    time: Any = NOW
    sender: Any = LAPTOP.node_id
    receiver: Any = HERE.node_id
    more: Any = msgspec.UNSET


@pytest.mark.parametrize(
    "changes",
    [
        *({"kind": kind} for kind in ("shutdown", "settings", "update", "")),
        *({"number": number} for number in (-1, 2**53 + 1, "7", None)),
        {"time": float("nan")},
        {"sender": "x" * 65},
        {"more": {"memory": 500}},
    ],
)
def test_the_wallet_itself_can_order_nothing_else(changes: dict[str, Any]) -> None:
    fields = [value for value in structs.astuple(Anything(**changes)) if value is not msgspec.UNSET]
    signed: Signed[Any] = sign_message(wallet_of(0), MACHINE_KIND, fields)
    assert "not one of this wallet" in refusal_of(MachineRequest(LAPTOP.delegation.signed, signed))


GOOD = msgspec.msgpack.encode(request_of())


@given(place=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_a_request_with_any_other_byte_is_refused(place: int, byte: int, cut: int) -> None:
    for data in (GOOD[:place] + bytes([byte]) + GOOD[place + 1 :], GOOD[:cut]):
        try:
            request = msgpack_decoder(MachineRequest).decode(data)
            order = orders_of(0).check(LAPTOP.node_id, request, NOW)
        except (ValueError, RequestRefusedError):
            continue
        assert order == PAUSE
        assert data == GOOD


def test_messages_within_their_bounds_fit_and_larger_ones_are_not_read() -> None:
    status = machine_status(training_status(), "laptop")
    answer = MachineAnswer(HERE.delegation.signed, status, 2**53, has_obeyed=False, message="é" * 300)
    for message, limits in ((request_of(), REQUEST_LIMITS), (answer, ANSWER_LIMITS)):
        frame = Frame(MACHINE_KIND, message)
        assert as_received(frame, limits) == frame
    assert len(encode(Frame(MACHINE_KIND, request_of())).head) < MAX_REQUEST_BYTES
    assert len(encode(Frame(MACHINE_KIND, answer)).head) < MAX_ANSWER_BYTES
    long = MachineRequest(LAPTOP.delegation.signed, Signed[MachineOrder](bytes(MAX_REQUEST_BYTES), FORGED))
    with pytest.raises(FrameTooLargeError):
        as_received(Frame(MACHINE_KIND, long), REQUEST_LIMITS)
    for wrong in ({}, {"delegation": 1}, {"status": "pause"}):
        with pytest.raises(MalformedFrameError):
            as_received(Frame(MACHINE_KIND, wrong), REQUEST_LIMITS)


def test_only_a_machine_of_the_wallet_can_answer() -> None:
    status = machine_status(training_status(), "laptop")
    asker = orders_of(0)
    assert asker.is_own(LAPTOP.node_id, MachineAnswer(LAPTOP.delegation.signed, status, 0), NOW)
    assert not asker.is_own(STRANGER.node_id, MachineAnswer(STRANGER.delegation.signed, status, 0), NOW)
    assert not asker.is_own(STRANGER.node_id, MachineAnswer(LAPTOP.delegation.signed, status, 0), NOW)


def test_a_number_rises_with_the_clock_and_above_all_that_is_known() -> None:
    orders = orders_of(0, newest=OrderMark(5, "a"))
    assert orders.next_mark(0, NOW) == OrderMark(int(NOW * 1000), HERE.node_id)
    orders.accept(orders.next_mark(0, NOW))
    assert orders.next_mark(0, NOW - DAY).number == int(NOW * 1000) + 1  # the clock was set back
    assert orders.next_mark(int(NOW * 2000), NOW).number == int(NOW * 2000) + 1  # another machine's clock is ahead


@given(
    numbers=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    kinds=st.lists(st.sampled_from(("pause", "resume")), min_size=3, max_size=3),
)
def test_machines_agree_on_the_newest_order_whichever_arrives_first(numbers: list[int], kinds: list[str]) -> None:
    """Three machines send at once, perhaps with equal numbers."""
    sent = [(OrderMark(number, node), kind) for number, node, kind in zip(numbers, "abc", kinds, strict=True)]
    ends: set[str] = set()
    for arrival in permutations(sent):
        orders, state = orders_of(0, newest=OrderMark(-1, "")), ""
        for mark, kind in (*arrival, *arrival):  # each comes twice
            if orders.accepts(mark):
                orders.accept(mark)
                state = kind
        ends.add(state)
    assert ends == {max(sent)[1]}


def test_a_report_is_within_its_bounds_whatever_the_node_says() -> None:
    status = training_status()
    training = replace(status.training, tokens_per_second=float("nan"))
    reason, version = "The disk \ud800 is full." + "x" * 500, "1" * 50
    odd = replace(status, training=training, state_reason=reason, version=version, run=None, model=None)
    report = machine_status(odd, "é\n\ud800" + "x" * 100)
    assert (report.name, report.tokens_per_second, report.run_id) == ("é" + "x" * 63, 0.0, "")
    answer = MachineAnswer(HERE.delegation.signed, report, 0)
    limits = FrameLimits(message=MachineAnswer)
    assert as_received(Frame(MACHINE_KIND, answer), limits).read(MachineAnswer) == answer
