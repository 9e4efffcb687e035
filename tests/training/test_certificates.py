"""The certificate of a state that was taken over: the word of most counts, and lies have a price."""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import pytest
from msgspec import structs

from neuroshard.consensus.roster import GroupMember
from neuroshard.consensus.round_messages import Phase, Quorum, Value, Vote, signed_by
from neuroshard.consensus.round_requests import (
    CERTIFICATE,
    REQUEST_LIMITS,
    CertificateRequest,
    certificate_answer,
    certificate_of,
)
from neuroshard.messages import Frame, MalformedFrameError, TensorPart, TensorSpec
from neuroshard.messages.frame import pack, unpack
from neuroshard.network import InMemoryNetwork, RequestRefusedError, ScoreReason
from neuroshard.state.download import ReplicaClient
from neuroshard.types import NodeId
from tests.worlds.clock import at_once
from tests.worlds.replicas import IDENTITIES, NAMES, NOW, STAGE, play

ROOT, ELSEWHERE = "ab" * 32, "cd" * 32
ASKER, *OTHERS = NAMES[:5]


def certificate(next_root: str = ROOT, sequences: int = 100, phase: Phase = Phase.COMMIT) -> Quorum:
    members = tuple(sorted(GroupMember(name, IDENTITIES[name].wallet_id) for name in OTHERS))
    value = Value("1" * 64, "2" * 64, "3" * 64, ("4" * 64,), members, (), (), next_root, sequences)
    vote = Vote(value.step_id, 0, phase, value.digest)
    return Quorum(value, 0, phase, tuple(signed_by(IDENTITIES[one.node_id], vote, NOW) for one in members))


def asked(answers: dict[NodeId, Quorum | Frame | None]) -> tuple[Quorum | None, list[tuple[NodeId, ScoreReason]]]:
    """What is believed when these answer so, and who is reported."""
    reported, believed = list[tuple[NodeId, ScoreReason]](), list[Quorum | None]()

    async def scenario(network: InMemoryNetwork) -> None:
        for name, told in answers.items():

            async def answer(_sender: NodeId, frame: Frame, told: Quorum | Frame | None = told) -> Frame:
                await anyio.lowlevel.checkpoint()
                assert frame.read(CertificateRequest) == CertificateRequest(STAGE, ROOT)
                if told is None:
                    raise RequestRefusedError("It knows none.")
                return told if isinstance(told, Frame) else certificate_answer(told)

            network.join(name).serve(CERTIFICATE, answer, REQUEST_LIMITS)
        asking = ReplicaClient(network.join(ASKER), lambda peer, reason: reported.append((peer, reason)), at_once)
        believed.append(await certificate_of(asking, STAGE, ROOT, OTHERS))

    play(scenario)
    return believed[0], reported


def test_what_most_of_those_say_who_know_one_is_believed() -> None:
    true, other = certificate(), certificate(sequences=7)
    a, b, c, d = OTHERS
    assert asked({a: true, b: true, c: other, d: None}) == (true, [])
    assert asked({a: true}) == (true, [])  # the others are gone
    assert asked({a: true, b: other}) == (None, [])
    assert asked({a: None, b: None}) == (None, [])


@pytest.mark.parametrize(
    "lie",
    [
        certificate(ELSEWHERE),
        certificate(phase=Phase.PREPARE),
        structs.replace(certificate(), votes=()),
        structs.replace(certificate(), votes=certificate(sequences=7).votes),
        replace(certificate_answer(certificate()), tensors=()),
        replace(certificate_answer(certificate()), tensors=(TensorPart(TensorSpec("x", "uint8", (1,)), b"x"),)),
    ],
)
def test_what_is_no_certificate_of_the_state_costs_its_sender(lie: Quorum | Frame) -> None:
    a, b, *_ = OTHERS
    believed, ((node, _),) = asked({a: lie, b: certificate()})
    assert (believed, node) == (certificate(), a)


def test_a_request_that_names_no_root_is_refused() -> None:
    for request, path in (({"root": "near"}, "at `$.root`"), ({}, "missing required field `root`")):
        data = pack({"stage": {"run_id": STAGE.run_id, "layers": [0, 1]}, **request})
        with pytest.raises(MalformedFrameError, match=re.escape(path)):
            unpack(data, CertificateRequest)
