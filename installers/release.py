"""The publisher's part of `neuroshard update`: make a release key, sign a manifest. docs/INSTALLING.md has the steps.

python installers/release.py keygen --out release-key
python installers/release.py sign --key release-key --base-url https://.../ --notes notes.txt dist/*.update.tar.gz
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tarfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from neuroshard.identity.signing import SigningKey
from neuroshard.types import DAY_SECONDS
from neuroshard.update.manifest import Artefact, UpdateManifest

ENDING = ".update.tar.gz"


def make_key(path: Path) -> str:
    """Write a new secret key (hex, mode 0600) and return its public key. An existing file is never overwritten."""
    key = SigningKey.generate()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.seed.hex() + "\n")
    return key.public_key.hex()


def artefact_of(archive: Path, base_url: str) -> tuple[str, str, Artefact]:
    """Version, platform and description of an archive named neuroshard-VERSION-PLATFORM.update.tar.gz."""
    parts = archive.name.removesuffix(ENDING).split("-", 2)
    if not archive.name.endswith(ENDING) or len(parts) != 3:
        raise SystemExit(f"{archive} does not have a name like neuroshard-VERSION-PLATFORM{ENDING}.")
    with tarfile.open(archive) as content:
        unpacked = sum(member.size for member in content)
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    url = f"{base_url.rstrip('/')}/{archive.name}"
    return parts[1], parts[2], Artefact(url, archive.stat().st_size, unpacked, digest)


def sign(key: SigningKey, archives: list[Path], arguments: argparse.Namespace, now: float) -> bytes:
    """The signed manifest of one version's archives. Raises SystemExit if they belong to several versions."""
    found = [artefact_of(archive, arguments.base_url) for archive in archives]
    versions = {version for version, _platform, _artefact in found}
    if len(versions) != 1:
        raise SystemExit(f"All archives must have the same version. These have {', '.join(sorted(versions))}.")
    manifest = UpdateManifest(
        version=versions.pop(),
        minimal_version=arguments.minimal_version,
        issued_at=int(now),
        expires_at=int(now + arguments.days * DAY_SECONDS),
        notes=arguments.notes.read_text(encoding="utf-8").strip(),
        artefacts={platform: artefact for _version, platform, artefact in found},
    )
    return manifest.signed(key)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser("keygen")
    keygen.add_argument("--out", type=Path, required=True)
    signing = commands.add_parser("sign")
    signing.add_argument("archives", type=Path, nargs="+")
    signing.add_argument("--key", type=Path, required=True)
    signing.add_argument("--base-url", required=True)
    signing.add_argument("--notes", type=Path, required=True)
    signing.add_argument("--minimal-version", default="0.1.0")
    signing.add_argument("--days", type=int, default=60)
    signing.add_argument("--out", type=Path, default=Path("update.json"))
    arguments = parser.parse_args()
    if arguments.command == "keygen":
        print(f"public key: {make_key(arguments.out)}")
        return
    key = SigningKey.from_seed(bytes.fromhex(arguments.key.read_text(encoding="ascii").strip()))
    arguments.out.write_bytes(sign(key, arguments.archives, arguments, time.time()))
    print(arguments.out)


if __name__ == "__main__":
    main()
