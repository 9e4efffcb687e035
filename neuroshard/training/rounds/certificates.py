"""Who took a state over asks the others for the certificate that led to it: that names who votes on the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import anyio

from neuroshard.network import RequestRefusedError, ScoreReason
from neuroshard.swarm.certified.bodies import Phase, Vote
from neuroshard.swarm.certified.messages import CertificateSaid, Quorum
from neuroshard.swarm.certified.packets import MalformedMessageError, from_frame, limits_for, to_frame
from neuroshard.swarm.claim_fields import hash_field
from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.errors import DonorError, LyingDonorError
from neuroshard.training.transfer.fields import StageName, read_request_about, request_about
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits

CERTIFICATE = "round/certificate"
REQUEST_LIMITS = FrameLimits(max_header_bytes=1024)
ANSWER_SECONDS = 10.0
MOST_ASKED = 16


def read_certificate_request(frame: Frame) -> tuple[StageName, str]:
    """The stage and the hex root whose certificate is wanted. Raises RequestRefusedError."""
    stage, fields = read_request_about(frame, "root")
    try:
        return stage, hash_field(fields["root"], "root")
    except ValueError as error:
        raise RequestRefusedError(f"The request cannot be read: {error}.") from None


def certificate_answer(certificate: Quorum) -> Frame:
    """The answer of who has it."""
    return to_frame(CertificateSaid(certificate))


async def certificate_of(asking: Asking, stage: StageName, root: str, peers: Sequence[NodeId]) -> Quorum | None:
    """The certificate that led to this root, by the word of more than half of those nodes that know one.

    Its signatures are checked, but who votes there follows from the certificate before it: that the state is the right
    one is what most of its holders say, and so is this.
    """
    found = dict[NodeId, Quorum]()

    async def ask(peer: NodeId) -> None:
        request = request_about(CERTIFICATE, stage, root=root)
        try:
            answer = await asking.ask(peer, request, limits_for(0), ANSWER_SECONDS)
            found[peer] = await asking.offload(lambda: _read(answer, root))
        except LyingDonorError as error:
            asking.report(peer, error.reason)
        except DonorError:
            pass  # it does not know, or is gone

    async with anyio.create_task_group() as tasks:
        for peer in list(peers)[:MOST_ASKED]:
            tasks.start_soon(ask, peer)
    counted = Counter(certificate.value.digest for certificate in found.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(found):
        return None
    return next(one for one in found.values() if one.value.digest == counted[0][0])


def _read(answer: Frame, root: str) -> Quorum:
    """Raises LyingDonorError for anything but a certificate that led to this root."""
    try:
        message = from_frame(answer)
    except MalformedMessageError as error:
        raise LyingDonorError(error.message, ScoreReason.MALFORMED_FRAME) from None
    certificate = message.certificate if isinstance(message, CertificateSaid) else None
    if certificate is None or certificate.phase is not Phase.COMMIT or certificate.value.next_root != root:
        raise LyingDonorError("Its answer is not the certificate that was asked for.")
    value, votes = certificate.value, certificate.votes
    said = Vote(value.step_id, certificate.view, certificate.phase, value.digest)
    if not votes or any(vote.body != said for vote in votes):
        raise LyingDonorError("Its certificate has votes for something else.")
    return certificate
