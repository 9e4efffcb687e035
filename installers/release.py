"""The publisher's part of `neuroshard update`: keys, the root of trust, releases and timestamps, in the formats of TUF.

python installers/release.py keygen --out KEY                         a secret key and KEY.pub
python installers/release.py root --repository DIR --sign KEY ...     the first root of trust, or the next one
python installers/release.py sign-root --repository DIR --sign KEY    add signatures to a root that has too few
python installers/release.py release --repository DIR --sign KEY --timestamp KEY --notes FILE ARCHIVE ...
python installers/release.py timestamp --repository DIR --sign KEY    renew the timestamp

docs/RELEASING.md has the steps. DIR is the folder to publish. No command changes a file that clients already read,
apart from timestamp.json, which is replaced last.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tarfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from getpass import getpass
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

sys.path.insert(0, str(Path(__file__).parents[1]))
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import NeuroShardError
from neuroshard.update.release import read_release, target_name

ENDING = ".update.tar.gz"
DRAFT = "root.draft.json"
MAX_TIMESTAMP_DAYS = 30
RoleT = TypeVar("RoleT", Root, Timestamp, Snapshot, Targets)


def make_key(path: Path, passphrase: bytes | None = None) -> None:
    """Write a new Ed25519 key (PEM, mode 0600) and its public half, `path`.pub. An existing file is never replaced."""
    key = Ed25519PrivateKey.generate()
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for place, content, mode in ((path, secret, 0o600), (path.with_name(path.name + ".pub"), public, 0o644)):
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def read_signer(path: Path) -> CryptoSigner:
    """The key of a file. Asks for its passphrase if it has one. Raises SystemExit."""
    content = path.read_bytes()
    try:
        try:
            key = load_pem_private_key(content, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(content, getpass(f"Passphrase of {path}: ").encode())
    except ValueError as error:
        raise SystemExit(f"{path} cannot be read as a secret key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SystemExit(f"{path} is not an Ed25519 key.")
    return CryptoSigner(key)


def read_public(path: Path) -> SSlibKey:
    """The public key of a file. Raises SystemExit."""
    try:
        return SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()))
    except ValueError as error:
        raise SystemExit(f"{path} cannot be read as a public key: {error}") from None


class Repository:
    """A folder to publish: `metadata/` with signed files and `targets/` with archives."""

    def __init__(self, folder: Path) -> None:
        self.metadata, self.targets = folder / "metadata", folder / "targets"
        self.draft = folder / DRAFT

    def root(self) -> Metadata[Root] | None:
        """The newest root that enough keys signed, or None."""
        numbers = sorted(int(path.name.split(".")[0]) for path in self.metadata.glob("*.root.json"))
        return Metadata[Root].from_file(str(self.metadata / f"{numbers[-1]}.root.json")) if numbers else None

    def trusted_root(self) -> Root:
        """The newest root. Raises SystemExit without one or if it has expired."""
        root = self.root()
        if root is None:
            raise SystemExit("There is no root yet. Create one with `release.py root`.")
        if root.signed.is_expired():
            raise SystemExit("The root has expired. Create the next one with `release.py root`.")
        return root.signed

    def timestamp(self) -> Timestamp | None:
        """The published timestamp, or None before the first release."""
        path = self.metadata / "timestamp.json"
        return Metadata[Timestamp].from_file(str(path)).signed if path.exists() else None

    def write_root(self, root: Metadata[Root]) -> str:
        """Publish a root that enough keys signed, otherwise keep it as a draft. Returns a sentence about it."""
        before, data = self.root(), root.to_bytes()
        result = root.signed.get_root_verification_result(
            before.signed if before else None, root.signed_bytes, root.signatures
        )
        if not result:
            write_atomically(self.draft, data, mode=0o644)
            own, old = result.second.missing, result.first.missing if before else 0
            return f"Root {root.signed.version} needs signatures: {own} of its own keys, {old} of the keys before it."
        self.metadata.mkdir(exist_ok=True)
        write_atomically(self.metadata / f"{root.signed.version}.root.json", data, mode=0o644)
        self.draft.unlink(missing_ok=True)
        return f"Root {root.signed.version} is signed by enough keys."

    def write(self, role: Timestamp | Snapshot | Targets, signer: CryptoSigner) -> None:
        """Sign and publish. Raises SystemExit if the root does not give the key this role."""
        data = _signed(self.trusted_root(), role, signer)
        name = "timestamp.json" if isinstance(role, Timestamp) else f"{role.version}.{role.type}.json"
        write_atomically(self.metadata / name, data, mode=0o644)

    def newest(self, kind: type[RoleT], version: int) -> RoleT:
        """A published snapshot or list of targets."""
        return Metadata[kind].from_file(str(self.metadata / f"{version}.{kind.type}.json")).signed


def _signed(root: Root, role: Timestamp | Snapshot | Targets, signer: CryptoSigner) -> bytes:
    signed = Metadata(role)
    signed.sign(signer)
    try:
        root.verify_delegate(role.type, signed.signed_bytes, signed.signatures)
    except UnsignedMetadataError:
        raise SystemExit(f"This key may not sign {role.type}: root {root.version} names another one.") from None
    return signed.to_bytes()


def _after(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def next_root(
    before: Root | None,
    keys: dict[str, Sequence[SSlibKey]],
    threshold: int | None,
    days: float,
) -> Root:
    """Version 1, or the root after `before`. A role without keys in `keys` keeps those of the root before.

    Raises SystemExit for a root that could not work.
    """
    root = Root(version=before.version + 1 if before else 1, expires=_after(days), consistent_snapshot=True)
    for role in root.roles:
        chosen = keys.get(role) or ([before.get_key(name) for name in before.roles[role].keyids] if before else [])
        if not chosen:
            raise SystemExit("The first root needs --root-key, --release-key and --timestamp-key.")
        for key in chosen:
            root.add_key(key, role)
    root.roles[Root.type].threshold = threshold or (before.roles[Root.type].threshold if before else 0)
    if not 1 <= root.roles[Root.type].threshold <= len(root.roles[Root.type].keyids):
        raise SystemExit(f"--threshold must be 1 to {len(root.roles[Root.type].keyids)}, the number of root keys.")
    return root


def sign_root(root: Metadata[Root], signers: Iterable[CryptoSigner], before: Root | None) -> None:
    """Add signatures. Raises SystemExit for a key of neither this root nor the one before."""
    known = set(root.signed.roles[Root.type].keyids) | (set(before.roles[Root.type].keyids) if before else set())
    for signer in signers:
        if signer.public_key.keyid not in known:
            raise SystemExit("A key given with --sign is a root key of neither this root nor the one before.")
        root.sign(signer, append=True)


def add_archive(repository: Repository, archive: Path, notes: str, minimal_version: str) -> tuple[str, TargetFile]:
    """Copy an archive named neuroshard-VERSION-PLATFORM.update.tar.gz to its place and describe it."""
    parts = archive.name.removesuffix(ENDING).split("-", 2)
    if not archive.name.endswith(ENDING) or len(parts) != 3:
        raise SystemExit(f"{archive} does not have a name like neuroshard-VERSION-PLATFORM{ENDING}.")
    with tarfile.open(archive) as content:
        unpacked = sum(member.size for member in content)
    custom = {"version": parts[1], "minimal_version": minimal_version, "unpacked_size": unpacked, "notes": notes}
    try:
        read_release(custom)
    except NeuroShardError as error:
        raise SystemExit(str(error)) from None
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = target_name(parts[2])
    repository.targets.mkdir(exist_ok=True)
    place = repository.targets / f"{digest}.{name}"
    if not place.exists():
        part = place.with_name(f"{place.name}.part")
        shutil.copyfile(archive, part)
        part.replace(place)
    target = TargetFile(archive.stat().st_size, {"sha256": digest}, name, {"custom": custom})
    return parts[1], target


def release(repository: Repository, arguments: argparse.Namespace) -> str:
    """Publish a version, or sign the newest one again if no archive is given. Returns a sentence about it."""
    timestamp, signer = repository.timestamp(), read_signer(arguments.sign)
    before = repository.newest(Snapshot, timestamp.snapshot_meta.version) if timestamp else None
    targets = repository.newest(Targets, before.meta["targets.json"].version) if before else Targets()
    if before:
        targets.version += 1
    targets.expires = _after(arguments.days)
    notes = arguments.notes.read_text(encoding="utf-8").strip() if arguments.notes else ""
    versions = set[str]()
    for archive in arguments.archives:
        version, target = add_archive(repository, archive, notes, arguments.minimal_version)
        versions.add(version)
        targets.targets[target.path] = target
    if len(versions) > 1:
        raise SystemExit(f"All archives must have the same version. These have {', '.join(sorted(versions))}.")
    repository.write(targets, signer)
    snapshot = Snapshot(version=before.version + 1 if before else 1, expires=targets.expires)
    snapshot.meta["targets.json"] = _described(repository, targets)
    repository.write(snapshot, signer)
    renew(repository, read_signer(arguments.timestamp), arguments.timestamp_days, snapshot)
    return f"Release {versions.pop() if versions else '(again)'} is in {repository.metadata.parent}."


def renew(repository: Repository, signer: CryptoSigner, days: float, snapshot: Snapshot | None = None) -> None:
    """Publish the next timestamp of the newest snapshot, or of `snapshot`. Clients that see no newer one refuse it
    after `days`. Raises SystemExit."""
    if not 0 < days <= MAX_TIMESTAMP_DAYS:
        raise SystemExit(f"A timestamp is valid for at most {MAX_TIMESTAMP_DAYS} days.")
    before = repository.timestamp()
    if snapshot is None and before is None:
        raise SystemExit("There is no release yet. Publish one with `release.py release`.")
    version = snapshot.version if snapshot else before.snapshot_meta.version if before else 1
    data = (repository.metadata / f"{version}.snapshot.json").read_bytes()
    described = MetaFile.from_data(version, data, ["sha256"])
    repository.write(Timestamp((before.version if before else 0) + 1, None, _after(days), described), signer)


def _described(repository: Repository, targets: Targets) -> MetaFile:
    data = (repository.metadata / f"{targets.version}.targets.json").read_bytes()
    return MetaFile.from_data(targets.version, data, ["sha256"])


def change_root(repository: Repository, arguments: argparse.Namespace) -> str:
    """Create the first or the next root and sign it with the given keys. Returns a sentence about it."""
    before = repository.root()
    options = {Root.type: "root_key", Targets.type: "release_key", Snapshot.type: "release_key"}
    options[Timestamp.type] = "timestamp_key"
    keys = {role: [read_public(path) for path in getattr(arguments, option)] for role, option in options.items()}
    root = Metadata(next_root(before.signed if before else None, keys, arguments.threshold, arguments.days))
    return _add_signatures(repository, root, arguments.sign)


def continue_root(repository: Repository, arguments: argparse.Namespace) -> str:
    """Add signatures to the draft. Returns a sentence about it."""
    before = repository.root()
    draft = Metadata[Root].from_file(str(repository.draft)) if repository.draft.exists() else None
    if draft is None or draft.signed.version != (before.signed.version if before else 0) + 1:
        raise SystemExit("There is no draft of the next root. Create one with `release.py root`.")
    return _add_signatures(repository, draft, arguments.sign)


def _add_signatures(repository: Repository, root: Metadata[Root], paths: Iterable[Path]) -> str:
    before = repository.root()
    sign_root(root, map(read_signer, paths), before.signed if before else None)
    return repository.write_root(root)


def arguments_of(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser("keygen")
    keygen.add_argument("--out", type=Path, required=True)
    keygen.add_argument("--passphrase", action="store_true", help="ask for a passphrase, which encrypts the key")
    on_repository = {name: commands.add_parser(name) for name in ("root", "sign-root", "release", "timestamp")}
    for command in on_repository.values():
        command.add_argument("--repository", type=Path, required=True)
    root, sign, publish, timestamp = on_repository.values()
    for option in ("--root-key", "--release-key", "--timestamp-key"):
        root.add_argument(option, type=Path, nargs="+", default=(), metavar="PUB", help="unset: as in the root before")
    root.add_argument("--threshold", type=int, help="number of root keys that must sign; unset: as before")
    root.add_argument("--days", type=float, default=730, help="validity")
    root.add_argument(
        "--sign", type=Path, nargs="+", default=(), metavar="KEY", help="root keys of this and the old root"
    )
    sign.add_argument("--sign", type=Path, nargs="+", required=True, metavar="KEY")
    publish.add_argument("archives", type=Path, nargs="*", help="none: sign the newest release again")
    publish.add_argument("--sign", type=Path, required=True, metavar="KEY", help="the release key")
    publish.add_argument("--timestamp", type=Path, required=True, metavar="KEY", help="the timestamp key")
    publish.add_argument("--notes", type=Path)
    publish.add_argument("--minimal-version", default="0.1.0", help="older versions need the installer")
    publish.add_argument("--days", type=float, default=365, help="validity of the release")
    publish.add_argument("--timestamp-days", type=float, default=14)
    timestamp.add_argument("--sign", type=Path, required=True, metavar="KEY", help="the timestamp key")
    timestamp.add_argument("--days", type=float, default=14, help="validity")
    arguments = parser.parse_args(line)
    if arguments.command == "release" and arguments.archives and not arguments.notes:
        parser.error("--notes is missing: a file with what is new")
    return arguments


def main(line: Sequence[str] | None = None) -> None:
    """Do what the arguments say."""
    arguments = arguments_of(line)
    if arguments.command == "keygen":
        passphrase = getpass(f"New passphrase of {arguments.out}: ").encode() if arguments.passphrase else None
        make_key(arguments.out, passphrase)
        print(f"{arguments.out} is secret, {arguments.out}.pub is its public half.")
        return
    repository = Repository(arguments.repository)
    arguments.repository.mkdir(parents=True, exist_ok=True)
    try:
        match arguments.command:
            case "root":
                print(change_root(repository, arguments))
            case "sign-root":
                print(continue_root(repository, arguments))
            case "release":
                print(release(repository, arguments))
            case _:
                renew(repository, read_signer(arguments.sign), arguments.days)
                print("The timestamp is renewed.")
    except (OSError, RepositoryError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
