"""Readers of signed records, and of messages on an open connection: handshakes, claims, the directory, relays."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, TypeVar, cast, get_type_hints

import msgspec
import trio
from google.protobuf.message import Message
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Reservation, Status, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from msgspec.structs import replace
from multiaddr import Multiaddr

from neuroshard.errors import DataError, UsageError
from neuroshard.identity import (
    ClaimTooLargeError,
    MalformedClaimError,
    canonical_json,
    parse_json,
    read_claim,
    run_parameters_from_json,
    run_parameters_to_json,
    verify_claim,
)
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import signed_announcement, signed_report
from neuroshard.membership.handshake import HANDSHAKE, HANDSHAKE_LIMITS, HandshakeMessage
from neuroshard.membership.reports import MAX_REPORT_BYTES, TrainingReport
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.messages import Frame, FrameDecoder, FrameLimits, WireError, encode
from neuroshard.network import RequestRefusedError, Transport
from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.directory import (
    FIND_ANSWER,
    FIND_KIND,
    STORE_ANSWER,
    STORE_KIND,
    FindAnswer,
    FindRequest,
    FoundNode,
    KademliaDirectory,
    StoreRequest,
)
from neuroshard.network.libp2p.relay_messages import (
    MAX_MESSAGE_BYTES,
    RelayError,
    encode_message,
    encoded_node_id,
    node_of,
    read_message,
)
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.transport import checked_record
from neuroshard.runs.offer import MAX_OFFER_BYTES, read_offer
from neuroshard.types import NodeId, ShardRange
from tests.fuzz.target import Target, golden
from tests.fuzz.wire_targets import seal
from tests.worlds.claims import EPOCH, REPORT, altered, announcement_of, identity_of, told

T = TypeVar("T")
LOCAL, PEER = identity_of(1), identity_of(2)
_NAMESPACE = "run/0"
_ANNOUNCED = signed_announcement(PEER, announcement_of(PEER), EPOCH)
_REPORTED = signed_report(PEER, REPORT, EPOCH)
_ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER.node_id}"
_MESSAGES: tuple[Callable[[], Message], ...] = (HopMessage, StopMessage, HolePunch)


def read_frame(kind: str, header: bytes, limits: FrameLimits, body: bytes = b"") -> Frame | None:
    """The frame that a peer makes of these parts; None when the decoder refuses it."""
    stream = seal(kind.encode(), header, body)
    decoder = FrameDecoder(lambda _: limits)
    try:
        position = 0
        while position < len(stream) and not decoder.is_complete:
            position += decoder.feed(stream[position:])
        return decoder.frame()
    except WireError:
        return None


def written(frame: Frame, limits: FrameLimits) -> Frame | None:
    """The frame after it was bytes."""
    encoded_frame = encode(frame)
    decoder = FrameDecoder(lambda _: limits)
    for piece in (encoded_frame.head, *encoded_frame.body):
        view = memoryview(piece).cast("B")
        while view:
            view = view[decoder.feed(bytes(view)) :]
    return decoder.frame()


def head(message: object) -> bytes:
    """The header of a frame without tensors."""
    return msgspec.msgpack.encode({"h": message, "t": []})


def check_hello(data: bytes) -> None:
    """A handshake that is read can be sent again."""
    frame = read_frame(HANDSHAKE, data, HANDSHAKE_LIMITS)
    if frame is not None:
        assert written(frame, HANDSHAKE_LIMITS) == frame
        assert isinstance(frame.message, HandshakeMessage)


def hello_seeds() -> tuple[bytes, ...]:
    """Good ones and wrong ones."""
    values: tuple[dict[str, object], ...] = (
        {"announcement": _ANNOUNCED, "report": _REPORTED, "addresses": [_ADDRESS, "/memory"]},
        {"announcement": b"", "report": None, "addresses": []},
        {"announcement": b"x", "report": b"y", "addresses": ["no address"]},
        {"announcement": "text", "report": 1, "addresses": {"a": 1}},
        {"announcement": b"x", "report": None, "addresses": [_ADDRESS] * 40},
        {"announcement": b"x", "report": None, "addresses": [_ADDRESS, 7]},
        {"other": 1},
    )
    return tuple(head(value) for value in values)


def check_report(data: bytes) -> None:
    """A signed report that is read can be sent again and means the same."""
    try:
        claim = read_claim(data, TrainingReport, MAX_REPORT_BYTES)
    except (ClaimTooLargeError, MalformedClaimError):
        return
    assert read_claim(claim.encode(), TrainingReport) == claim


def report_seeds() -> tuple[bytes, ...]:
    """Reports as they travel, one cut off, and one that is too long."""
    full = replace(REPORT, windows=(StageRange(0, 2),), cached=(ShardRange(3, 9),), leaving=True)
    return (_REPORTED, signed_report(PEER, full, EPOCH), _REPORTED[:-70], _REPORTED + bytes(MAX_REPORT_BYTES))


def check_statements(data: bytes) -> None:
    """Announcements and reports before their signature counts: what is read can be said again and means the same."""
    for form in (TrainingReport, Announcement):
        try:
            statement = msgspec.msgpack.decode(data, type=form)
        except (ValueError, RecursionError):
            continue
        assert_whole_numbers(statement)
        assert again_of(statement) == statement


def assert_whole_numbers(statement: TrainingReport | Announcement) -> None:
    """Whatever is declared to be one is one, and neither 1.0 nor true."""
    hints = get_type_hints(type(statement))
    assert all(type(getattr(statement, name)) is int for name, hint in hints.items() if hint is int)


def again_of(statement: T) -> T:
    """What was written, read again; to be unable to is a defect."""
    data = msgspec.msgpack.encode(statement)
    try:
        return msgspec.msgpack.decode(data, type=type(statement))
    except ValueError as error:
        raise AssertionError(data) from error


def statement_seeds() -> tuple[bytes, ...]:
    """One of each, one without optional parts, and some with numbers that are none."""
    announcement = announcement_of(PEER, addresses=(_ADDRESS,))
    bare = {"loss_ema": None, "shard": None, "layers": None, "state_hash": "", "roles": []}
    silent = {**msgspec.to_builtins(announcement), "pool": None, "layers": None, "addresses": []}
    wrong = [told(REPORT, steps=1.0), told(REPORT, tokens=True), {**silent, "parameters_version": 1.0}]
    seeds = (REPORT, announcement, told(REPORT, **bare), silent, *wrong)
    return tuple(msgspec.msgpack.encode(value) for value in seeds)


class Reader:
    """Stands for a stream that has all its bytes already: what reads it never waits."""

    def __init__(self, data: bytes, portion: int) -> None:
        self._data = data
        self._portion = portion
        self.largest = 0

    async def read(self, n: int) -> bytes:
        """At least one byte and at most n."""
        self.largest = max(self.largest, n)
        piece, self._data = self._data[: min(n, self._portion)], self._data[min(n, self._portion) :]
        if not piece:
            raise MuxedStreamEOF
        return piece


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work that never waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        work.close()
    raise AssertionError("it waits")


def check_relay_message(data: bytes) -> None:
    """The first byte chooses the message and the portions. What is read can be written; its parts are checked."""
    if not data:
        return
    kind = _MESSAGES[data[0] % len(_MESSAGES)]
    reader = Reader(data[1:], 1 + data[0])
    try:
        message = at_once(read_message(cast("YamuxStream", reader), kind()))
    except (RelayError, MuxedStreamEOF):
        return
    finally:
        assert reader.largest <= MAX_MESSAGE_BYTES
    assert message.HasField("type")
    again = at_once(read_message(cast("YamuxStream", Reader(encode_message(message), 4096)), kind()))
    assert again.SerializeToString() == message.SerializeToString()
    if isinstance(message, HolePunch):
        check_addresses(message.ObsAddrs, NodeId(PEER.node_id))
        return
    with suppress(RelayError):
        node = node_of(message.peer.id)
        assert encoded_node_id(node) == message.peer.id
    if isinstance(message, HopMessage):
        check_addresses(message.reservation.addrs, None)


def check_addresses(addresses: Any, peer: NodeId | None) -> None:
    """Multiaddrs of strangers are text that is an address, or are refused."""
    for address in addresses[:8]:
        with suppress(ValueError, UsageError):
            parse_address(str(Multiaddr(address)) + (f"/p2p/{peer}" if peer else ""))


def relay_message_seeds() -> tuple[bytes, ...]:
    """The messages of a whole talk."""
    peer = PeerId(id=encoded_node_id(PEER.node_id), addrs=[Multiaddr(_ADDRESS).to_bytes()])
    place = Reservation(expire=1_700_000_000, addrs=[Multiaddr(_ADDRESS).to_bytes()])
    address = Multiaddr("/ip4/192.0.2.7/tcp/4001").to_bytes()
    messages = (
        (0, HopMessage(type=HopMessage.RESERVE)),
        (0, HopMessage(type=HopMessage.CONNECT, peer=peer)),
        (0, HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=place)),
        (1, StopMessage(type=StopMessage.CONNECT, peer=peer)),
        (1, StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED)),
        (2, HolePunch(type=HolePunch.CONNECT, ObsAddrs=[address, address])),
        (2, HolePunch(type=HolePunch.SYNC)),
    )
    return tuple(bytes([kind + 30]) + encode_message(message) for kind, message in messages)


class AnsweringPeer:
    """The transport of a directory whose only peer always gives the same answer."""

    local_id = LOCAL.node_id

    def __init__(self, answer: Frame) -> None:
        self.handlers: dict[str, Callable[[NodeId, Frame], Coroutine[Any, Any, Frame]]] = {}
        self._answer = answer

    def serve(self, kind: str, handler: Any, *_: object, **__: object) -> None:
        """Keep what the directory answers with."""
        self.handlers[kind] = handler

    def addresses(self) -> tuple[str, ...]:
        """Nobody dials this."""
        return ()

    async def request(self, _peer: NodeId, _frame: Frame, **_: object) -> Frame:
        """The same for every question."""
        await trio.lowlevel.checkpoint()
        return self._answer


def check_directory(data: bytes) -> None:
    """Questions are answered within limits or refused; answers give only records that hold."""
    for declared in (FindRequest, StoreRequest, FindAnswer):
        frame = read_frame(FIND_KIND, data, FrameLimits(message=declared))
        if frame is not None:
            trio.run(_converse, frame)


async def _converse(frame: Frame) -> None:
    peer = AnsweringPeer(frame)
    contacts = PeerAddressBook(LOCAL.node_id)
    directory = KademliaDirectory(
        cast("Transport", peer),
        contacts,
        now=lambda: EPOCH,
        random=Random(1),
        report=lambda *_: None,
        host_of=lambda _: "192.0.2.1",
        form=Announcement,
    )
    directory.meet(PEER.node_id)
    asked = {StoreRequest: (STORE_KIND, STORE_ANSWER), FindRequest: (FIND_KIND, FIND_ANSWER)}
    if type(frame.message) in asked:
        kind, limits = asked[type(frame.message)]
        with suppress(RequestRefusedError):
            answer = await peer.handlers[kind](PEER.node_id, frame)
            assert written(answer, limits) is not None
        return
    for record in await directory.find(_NAMESPACE):
        checked_record(None, record, EPOCH, Announcement)
    assert len(contacts) <= 17
    for address in contacts.of(PEER.node_id):
        assert parse_address(address.text) == address


def directory_seeds() -> tuple[bytes, ...]:
    """Questions, records to keep, and answers; good ones and bad ones."""
    key = bytes(range(32))
    other = identity_of(3)
    other_address = f"/ip4/192.0.2.9/tcp/4001/p2p/{other.node_id}"
    found = FoundNode(other.node_id, (other_address,)), FoundNode(PEER.node_id, (_ADDRESS,))
    values: tuple[object, ...] = (
        FindRequest(key, (_ADDRESS,)),
        FindRequest(key, (_ADDRESS,), _NAMESPACE, 3),
        {"key": key, "requester_addresses": [_ADDRESS, 7], "namespace": _NAMESPACE},
        StoreRequest(_NAMESPACE, _ANNOUNCED),
        StoreRequest(_NAMESPACE, b"no record"),
        {"namespace": "x" * 1000, "record": b"no record"},
        FindAnswer(found, (_ANNOUNCED, b"none")),
        FindAnswer((FoundNode("x", ("y",)), FoundNode("z", (other_address,)))),
        {"nodes": [["x", "y"], [1], 5, ["z", [other_address]]], "records": "text"},
    )
    return tuple(head(value) for value in values)


_NOW = 1_700_000_010.0


def check_claim(data: bytes) -> None:
    """A claim that can be decoded can be encoded again, unless that is too large, and verifying never crashes."""
    try:
        claim = read_claim(data, object)
    except DataError:
        return
    with suppress(ClaimTooLargeError):
        assert read_claim(claim.encode(), object) == claim
    with suppress(DataError):
        verify_claim(claim, "announcement", _NOW)


def check_run_parameters(data: bytes) -> None:
    """What stands before the signature is checked: parameters that are read can be written and read again."""
    try:
        parameters = run_parameters_from_json(parse_json(data, MAX_OFFER_BYTES))
    except (DataError, ValueError):
        return
    written = canonical_json(run_parameters_to_json(parameters))
    assert run_parameters_from_json(parse_json(written, 10 * MAX_OFFER_BYTES)) == parameters


def check_run_offer(data: bytes) -> None:
    """An offer that is read says the same again."""
    try:
        offer = read_offer(data)
    except DataError:
        return
    assert read_offer(offer.to_json()) == offer


def claim_seeds() -> tuple[bytes, ...]:
    """The golden claim, whole and with other payloads."""
    encoded = bytes.fromhex(golden("identity.json")["claim"]["encoded"])
    payloads = (
        None,
        [],
        {"😀": [-1e-300, 0.0, 1e5, 12345678901234567890]},
        "\0 é",
        b"\xff",
        msgspec.Raw(b"\x91" * 70 + b"\x90"),
    )
    others = (altered(encoded, partial(setitem, payload=payload)) for payload in payloads)
    return (encoded, *others)


def setitem(content: list[Any], payload: object) -> None:
    """Another payload in a claim."""
    content[0] = payload


def run_parameters_seeds() -> tuple[bytes, ...]:
    """The parameters of the golden runs."""
    return tuple(json.dumps(json.loads(run["signed"])["parameters"]).encode() for run in golden_runs())


def run_offer_seeds() -> tuple[bytes, ...]:
    """Offers of the golden runs, and one that mixes two."""
    runs = golden_runs()
    offers = [offer_of(run["run_id"], run["signed"], run["signed"]) for run in runs]
    return (*offers, offer_of(runs[0]["run_id"], runs[0]["signed"], runs[1]["signed"]))


def golden_runs() -> list[dict[str, str]]:
    """Run id and signed parameters of each."""
    return [golden("identity.json")["run"], *(run for run in golden("runs.json").values() if "signed" in run)]


def offer_of(run_id: str, initial: str, current: str) -> bytes:
    """An offer as JSON."""
    return f'{{"run_id":"{run_id}","initial":{initial},"current":{current}}}'.encode()


TARGETS = (
    Target("hello", check_hello, hello_seeds),
    Target("report", check_report, report_seeds),
    Target("statement", check_statements, statement_seeds),
    Target("relay-message", check_relay_message, relay_message_seeds),
    Target("directory", check_directory, directory_seeds, short_inputs=300),
    Target("claim", check_claim, claim_seeds),
    Target("run-parameters", check_run_parameters, run_parameters_seeds),
    Target("run-offer", check_run_offer, run_offer_seeds),
)
