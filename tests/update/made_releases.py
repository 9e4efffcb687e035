"""Small releases of a stand-in program, signed and served on the loopback as a publisher would."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from neuroshard.identity.signing import SigningKey
from neuroshard.update.checking import platform_name
from neuroshard.update.installation import Installation
from neuroshard.update.manifest import Artefact, UpdateManifest

from tests.data.hostile_server import HostileServer  # isort: skip

NOW = 1_800_000_000.0
DAY = 86_400.0
PUBLISHER = SigningKey.from_seed(bytes(range(32)))
PROGRAM = Path(__file__).with_name("standin_node.py")
MANIFEST = "update.json"


def archive_of(files: Mapping[str, bytes], *, padding: int = 0) -> bytes:
    """A .tar.gz of executable files; `padding` bytes that do not compress make it longer."""
    buffer = io.BytesIO()
    extra = {"padding": b"".join(sha256(str(index).encode()).digest() for index in range(padding // 32))}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {**files, **(extra if padding else {})}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def program(version: str, *, works: bool = True, calls_itself: str | None = None) -> bytes:
    """The stand-in program of a version."""
    head = f"#!{sys.executable}\nVERSION = {calls_itself or version!r}\nWORKS = {works}\n"
    return (head + PROGRAM.read_text(encoding="utf-8").replace("# ruff: noqa: F821\n", "")).encode()


def real_program(version: str) -> bytes:
    """This checkout's program, which calls itself another version."""
    lines = (
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})",
        "import neuroshard",
        f"neuroshard.__version__ = {version!r}",
        "from neuroshard.cli.main import main",
        "main()",
    )
    return "\n".join(lines).encode()


def manifest_of(version: str, archive: bytes, url: str, **changes: object) -> UpdateManifest:
    """A manifest for this platform, issued an hour ago; `changes` replace fields of it or of its artefact."""
    of_artefact = {"url", "size", "unpacked_size", "sha256"}
    artefact: dict[str, object] = {
        "url": url,
        "size": len(archive),
        "unpacked_size": 10_000_000,
        "sha256": sha256(archive).hexdigest(),
    }
    artefact |= {key: value for key, value in changes.items() if key in of_artefact}
    fields: dict[str, object] = {
        "version": version,
        "minimal_version": "0.1.0",
        "issued_at": NOW - 3600,
        "expires_at": NOW + 30 * DAY,
        "notes": f"What is new in {version}.",
        "artefacts": {platform_name(): Artefact(**artefact)},  # type: ignore[arg-type]
    }
    return UpdateManifest(**(fields | {key: value for key, value in changes.items() if key not in of_artefact}))  # type: ignore[arg-type]


@dataclass
class ReleasePlace:
    """A publisher's server."""

    server: HostileServer
    key: SigningKey = field(default=PUBLISHER)

    @property
    def url(self) -> str:
        """Address of the manifest."""
        return f"{self.server.url}/{MANIFEST}"

    def publish(self, version: str, archive: bytes, *, signer: SigningKey = PUBLISHER, **changes: object) -> None:
        """Put the archive and a signed manifest there."""
        name = f"neuroshard-{version}.tar.gz"
        self.server.files[name] = archive
        manifest = manifest_of(version, archive, f"{self.server.url}/{name}", **changes)
        self.server.files[MANIFEST] = manifest.signed(signer)

    def variables(self) -> dict[str, str]:
        """The environment of a program that trusts this publisher."""
        return {"NEUROSHARD_UPDATE_URL": self.url, "NEUROSHARD_UPDATE_KEY": self.key.public_key.hex()}


def installed(root: Path, version: str = "0.1.0", content: bytes | None = None) -> Installation:
    """An installation with one version, as an installer leaves it."""
    installation = Installation(root)
    folder = installation.folder(version)
    folder.mkdir(parents=True)
    (folder / "neuroshard").write_bytes(content if content is not None else program(version))
    (folder / "neuroshard").chmod(0o755)
    installation.mark_complete(version)
    (root / "current").write_text(f"{version}\n", encoding="ascii")
    return installation
