"""TLS contexts of the pool. A listener's certificate has its own key, for which the node key vouches (greeting.py).

Python reads a certificate's key only from a file. So it is not the node key, which stands in one private file only,
but one that is made at every start and worth nothing afterwards.
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from neuroshard.errors import StorageError

_ALWAYS = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC))  # clocks may be wrong; nobody looks


@dataclass(frozen=True)
class ListenerTls:
    """What a listener needs: its TLS context and the digest by which its certificate is vouched for."""

    context: ssl.SSLContext
    certificate_digest: bytes  # SHA-256, 32 bytes

    @classmethod
    def create(cls) -> ListenerTls:
        """With a new key. Raises StorageError when there is no folder for temporary files."""
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "neuroshard")])
        builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_ALWAYS)
        certificate = builder.sign(key, hashes.SHA256())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nobody resumes a session
        pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        _load(context, pem)
        return cls(context, certificate_digest(certificate.public_bytes(Encoding.DER)))


def dialler_context() -> ssl.SSLContext:
    """A context that accepts every certificate: who owns it is proved in the greeting, not by an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def certificate_digest(certificate: bytes) -> bytes:
    """Digest of a certificate in DER."""
    return sha256(certificate).digest()


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:  # for this user only, like the file in it
            file = Path(folder) / "listener.pem"
            file.touch(mode=0o600)
            file.write_bytes(pem)
            context.load_cert_chain(file)
    except OSError as error:
        raise StorageError(
            f"The listener for tensors cannot write a temporary file: {error.strerror or error}.",
            "Make the folder for temporary files writable.",
        ) from error
