"""A publisher of releases who signs what a test asks for, also what no honest one would, and the server of a mirror."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from neuroshard.update.checking import platform_name
from neuroshard.update.release import target_name
from tests.worlds.file_servers import HostileServer

HERE = platform_name()
TARGET = target_name(HERE)
TIMESTAMP = "metadata/timestamp.json"


def new_key() -> CryptoSigner:
    return CryptoSigner(Ed25519PrivateKey.generate())


def after(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def signed(content: Root | Timestamp | Snapshot | Targets, *keys: CryptoSigner) -> bytes:
    """The published bytes, with a signature of each key."""
    metadata = Metadata(content)
    for key in keys:
        metadata.sign(key, append=True)
    return metadata.to_bytes()


@dataclass
class Publisher:
    """Keys, and the files that they signed so far. Two of two root keys must sign a root."""

    root_keys: Sequence[CryptoSigner] = field(default_factory=lambda: (new_key(), new_key()))
    release_key: CryptoSigner = field(default_factory=new_key)
    timestamp_key: CryptoSigner = field(default_factory=new_key)
    files: dict[str, bytes] = field(default_factory=dict)
    versions: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("root", "timestamp", "snapshot", "targets"), 0)
    )
    targets: dict[str, TargetFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rotate()

    @property
    def anchor(self) -> bytes:
        """The first root, which is part of the program."""
        return self.files["metadata/1.root.json"]

    def rotate(
        self,
        *,
        root_keys: Sequence[CryptoSigner] = (),
        threshold: int = 2,
        signers: Sequence[CryptoSigner] = (),
        days: float = 365,
        version: int | None = None,
    ) -> None:
        """Write the next root, with the release and timestamp keys of now.

        Signed by the old and the new root keys, or by `signers`; written in the place of the next version, also when it
        names another one.
        """
        old, self.root_keys = self.root_keys, tuple(root_keys) or self.root_keys
        number = self._next("root")
        root = Root(version=version or number, expires=after(days))
        for role, keys in (
            ("root", self.root_keys),
            ("targets", [self.release_key]),
            ("snapshot", [self.release_key]),
            ("timestamp", [self.timestamp_key]),
        ):
            for key in keys:
                root.add_key(key.public_key, role)
        root.roles["root"].threshold = threshold
        all_keys = {key.public_key.keyid: key for key in (*old, *self.root_keys)}
        self.files[f"metadata/{number}.root.json"] = signed(root, *(signers or all_keys.values()))

    def release(self, version: str, archive: bytes, *, days: float = 30, **changes: object) -> None:
        """Publish a version for this platform. `changes` replace what the metadata say about it; `signer` signs it."""
        signer = changes.pop("signer", self.release_key)
        digest = str(changes.pop("sha256", sha256(archive).hexdigest()))
        size = changes.pop("size", len(archive))
        custom = {"version": version, "minimal_version": "0.1.0", "unpacked_size": 10_000_000}
        custom |= {"notes": f"What is new in {version}.", **changes}
        self.files[f"targets/{digest}.{TARGET}"] = archive
        self.targets[TARGET] = TargetFile(size, {"sha256": digest}, TARGET, {"custom": custom})  # type: ignore[arg-type]
        self.sign_targets(signer, days=days)  # type: ignore[arg-type]

    def sign_targets(self, signer: CryptoSigner | None = None, *, days: float = 30) -> None:
        """Write targets, snapshot and timestamp."""
        signer, number = signer or self.release_key, self._next("targets")
        data = signed(Targets(number, None, after(days), self.targets), signer)
        self.files[f"metadata/{number}.targets.json"] = data
        meta = {"targets.json": MetaFile.from_data(number, data, ["sha256"])}
        number = self._next("snapshot")
        self.files[f"metadata/{number}.snapshot.json"] = signed(Snapshot(number, None, after(days), meta), signer)
        self.renew()

    def renew(self, *, days: float = 7, version: int | None = None, signer: CryptoSigner | None = None) -> None:
        """Write the next timestamp of the newest snapshot."""
        self.versions["timestamp"] = version or self.versions["timestamp"] + 1
        data = self.files[f"metadata/{self.versions['snapshot']}.snapshot.json"]
        meta = MetaFile.from_data(self.versions["snapshot"], data, ["sha256"])
        timestamp = Timestamp(self.versions["timestamp"], None, after(days), meta)
        self.files[TIMESTAMP] = signed(timestamp, signer or self.timestamp_key)

    def _next(self, role: str) -> int:
        self.versions[role] += 1
        return self.versions[role]


@dataclass
class ReleasePlace:
    """A publisher's server. Tests of attacks replace its files."""

    server: HostileServer
    publisher: Publisher = field(default_factory=Publisher)

    @property
    def url(self) -> str:
        return self.server.url

    def publish(self, version: str, archive: bytes, *, timestamp_days: float = 7, **changes: object) -> None:
        """Put the archive and its signed metadata there."""
        self.publisher.release(version, archive, **changes)  # type: ignore[arg-type]
        self.publisher.renew(days=timestamp_days)
        self.put()

    def put(self) -> None:
        """Serve all that the publisher signed."""
        self.server.files.update(self.publisher.files)

    def variables(self) -> dict[str, str]:
        """The environment of a program that looks here."""
        return {"NEUROSHARD_UPDATE_URL": self.url}
