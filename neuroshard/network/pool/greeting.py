"""Who is at the other end: both sides prove their node keys, once TLS protects the connection.

    dialler  -> listener   magic, version, the dialler's nonce
    listener -> dialler    the listener's nonce, its signature over (certificate, dialler's nonce, listener)
    dialler  -> listener   its public key, its signature over (certificate, listener's nonce, dialler, listener),
                           its session
    listener -> dialler    the verdict, its session

A signature counts for one certificate, one nonce and one purpose. So neither can be replayed, nor passed on by a third
node in the middle: that node has another certificate.

A session is a number that stands for what its side remembers of the other one's transfers. It is another one when that
was forgotten, so also when the process was started again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from secrets import token_bytes

from neuroshard.identity import NodeKey, SignatureError, node_id_of, public_key_of, verify_signature
from neuroshard.identity.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, purpose_message
from neuroshard.network.pool.errors import GreetingError
from neuroshard.network.pool.secure_stream import SecureStream
from neuroshard.types import NodeId

_OPENING = b"NSPL\x02"  # magic, version
_NONCE_BYTES = 32
_SESSION_BYTES = 8


class Verdict(IntEnum):
    """What the listener says when it knows who dialled."""

    WELCOME = 0
    FULL = 1  # no more connections now
    UNWELCOME = 2


@dataclass(frozen=True)
class Sessions:
    """What was told on a connection."""

    here: int
    there: int


@dataclass(frozen=True)
class Reception:
    """How the listener receives the dialler."""

    verdict: Verdict
    session: int = 0  # the listener's


async def greet_as_dialler(
    stream: SecureStream, key: NodeKey, expected: NodeId, certificate_digest: bytes, session: int = 0
) -> Reception:
    """Prove this node's key to `expected`, after it proved its own. Raises GreetingError or ConnectionLostError."""
    try:
        expected_key = public_key_of(expected)
    except ValueError as error:
        raise GreetingError(str(error)) from None
    nonce = token_bytes(_NONCE_BYTES)
    await stream.send_all(_OPENING + nonce)
    answer = await stream.receive_bytes(_NONCE_BYTES + SIGNATURE_BYTES)
    listener_nonce, signature = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    _verify(expected_key, _listener_message(certificate_digest, nonce, expected), signature)
    message = _dialler_message(certificate_digest, listener_nonce, key.node_id, expected)
    await stream.send_all(key.public_key + key.sign(message) + session.to_bytes(_SESSION_BYTES, "little"))
    reception = await stream.receive_bytes(1 + _SESSION_BYTES)
    try:
        return Reception(Verdict(reception[0]), int.from_bytes(reception[1:], "little"))
    except ValueError:
        raise GreetingError(f"a listener answered {reception[0]}, which has no meaning") from None


async def greet_as_listener(
    stream: SecureStream, key: NodeKey, certificate_digest: bytes, judge: Callable[[NodeId], Reception]
) -> tuple[NodeId, Sessions]:
    """The node that dialled, when `judge` welcomes it. Raises GreetingError or ConnectionLostError."""
    opening = await stream.receive_bytes(len(_OPENING) + _NONCE_BYTES)
    if not opening.startswith(_OPENING):
        raise GreetingError("a dialler speaks another protocol or version")
    nonce = token_bytes(_NONCE_BYTES)
    signature = key.sign(_listener_message(certificate_digest, opening[len(_OPENING) :], key.node_id))
    await stream.send_all(nonce + signature)
    answer = await stream.receive_bytes(PUBLIC_KEY_BYTES + SIGNATURE_BYTES + _SESSION_BYTES)
    public_key, signature = answer[:PUBLIC_KEY_BYTES], answer[PUBLIC_KEY_BYTES:-_SESSION_BYTES]
    dialler = node_id_of(public_key)
    _verify(public_key, _dialler_message(certificate_digest, nonce, dialler, key.node_id), signature)
    reception = judge(dialler)
    await stream.send_all(bytes((reception.verdict,)) + reception.session.to_bytes(_SESSION_BYTES, "little"))
    if reception.verdict is not Verdict.WELCOME:
        raise GreetingError(f"node {dialler} was turned away: {reception.verdict.name.lower()}")
    return dialler, Sessions(reception.session, int.from_bytes(answer[-_SESSION_BYTES:], "little"))


def _verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    try:
        verify_signature(public_key, message, signature)
    except SignatureError:
        raise GreetingError("the other side does not have the node key it should have") from None


def _listener_message(certificate_digest: bytes, nonce: bytes, listener: NodeId) -> bytes:
    value = {"certificate": certificate_digest.hex(), "nonce": nonce.hex(), "listener": listener}
    return purpose_message("pool-listener", value)


def _dialler_message(certificate_digest: bytes, nonce: bytes, dialler: NodeId, listener: NodeId) -> bytes:
    value = {
        "certificate": certificate_digest.hex(),
        "nonce": nonce.hex(),
        "dialler": dialler,
        "listener": listener,
    }
    return purpose_message("pool-dialler", value)
