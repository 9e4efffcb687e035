"""NAT-PMP packets byte for byte, and what of a gateway's answers is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.network.nat.nat_pmp import (
    LONGEST_LEASE_SECONDS,
    SHORTEST_LEASE_SECONDS,
    ExternalHost,
    MappedPort,
    NatPmpRefusal,
    SeenEpoch,
    external_host_question,
    mapping_question,
    read_external_host,
    read_mapping,
)
from neuroshard.network.nat.router import Lease, RouterRefusedError

HOST = bytes.fromhex("00 80 0000 00000007 01020304")
MAPPED = bytes.fromhex("00 82 0000 00000007 0fa1 1388 00000e10")


def test_questions_are_those_of_the_specification() -> None:
    assert external_host_question() == bytes.fromhex("00 00")
    assert mapping_question(4001, 5000, 3600) == bytes.fromhex("00 02 0000 0fa1 1388 00000e10")
    assert mapping_question(4001, 0, 0) == bytes.fromhex("00 02 0000 0fa1 0000 00000000")


def test_answers_are_read() -> None:
    assert read_external_host(HOST) == ExternalHost("1.2.3.4", 7)
    assert read_mapping(MAPPED, 4001) == MappedPort(4001, 5000, 3600, 7)
    assert MappedPort(4001, 5000, 3600, 7).lease() == Lease(4001, 5000, 3600.0)


@pytest.mark.parametrize("packet", [HOST[:-1], HOST[:7], b"", b"\1" + HOST[1:], b"\0\0" + HOST[2:], MAPPED])
def test_what_is_no_answer_about_the_host_is_passed_over(packet: bytes) -> None:
    assert read_external_host(packet) is None


@pytest.mark.parametrize(
    "packet", [MAPPED[:-1], MAPPED[:7], b"", b"\2" + MAPPED[1:], b"\0\2" + MAPPED[2:], b"\0\x81" + MAPPED[2:], HOST]
)
def test_what_is_no_answer_about_the_port_is_passed_over(packet: bytes) -> None:
    assert read_mapping(packet, 4001) is None


def test_another_port_s_answer_is_passed_over() -> None:
    assert read_mapping(MAPPED, 4002) is None


@pytest.mark.parametrize(("result", "said"), [(2, "turned this off"), (3, "no internet connection"), (9, "result 9")])
def test_a_refusal_may_be_short_and_says_why(result: int, said: str) -> None:
    refusal = read_mapping(bytes((0, 130, 0, result, 0, 0, 0, 5)), 4001)
    assert refusal == NatPmpRefusal(result, 5)
    assert said in str(refusal.error())


@pytest.mark.parametrize(
    ("outer", "seconds"),
    [(0, 3600), (5000, 0), (5000, SHORTEST_LEASE_SECONDS - 1), (5000, LONGEST_LEASE_SECONDS + 1), (5000, 2**32 - 1)],
)
def test_a_success_that_makes_no_sense_is_refused(outer: int, seconds: int) -> None:
    with pytest.raises(RouterRefusedError):
        MappedPort(4001, outer, seconds, 7).lease()


@given(st.binary(max_size=40))
def test_no_packet_does_any_harm(packet: bytes) -> None:
    host, mapping = read_external_host(packet), read_mapping(packet, 4001)
    assert host is None or packet[0] == 0
    assert mapping is None or packet[0] == 0
    assert host is None or mapping is None


@given(st.integers(0, 2**31), st.floats(0, 1e6), st.floats(0.875, 1.125))
def test_a_gateway_s_clock_may_go_wrong_by_an_eighth(epoch: int, passed: float, rate: float) -> None:
    later = epoch + int(passed * rate)
    assert not SeenEpoch(epoch, 100.0).has_restarted(later, 100.0 + passed)


def test_a_table_that_is_younger_than_it_must_be_is_a_new_one() -> None:
    seen = SeenEpoch(1000, 50.0)
    assert seen.has_restarted(0, 51.0)
    assert seen.has_restarted(1080, 150.0)  # it should be 1100
    assert not seen.has_restarted(1086, 150.0)
    assert not seen.has_restarted(998, 50.0)
    assert not seen.has_restarted(5000, 150.0)  # this computer slept
