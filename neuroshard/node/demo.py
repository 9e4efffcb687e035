"""What `neuroshard demo` prepares: a folder and a throw-away wallet of its own, embedded data, a loopback server."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from neuroshard.dataset import BuiltGenesis, FolderText, GenesisServer, StandardLibraryText, build_genesis
from neuroshard.dataset.build_text import StageProgress
from neuroshard.errors import StorageError
from neuroshard.identity import Wallet

DEMO_FOLDER = "demo"
WALLET_FILE = "wallet"


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked of the demo."""

    steps: int | None = None  # end after this many further steps
    text_folder: Path | None = None  # the user's own text instead of the embedded one
    nodes: int = 1  # processes that train one run together on this computer
    stages: int = 1  # parts that the model is cut into

    @property
    def stages_a_node(self) -> int | None:
        """How many stages each node begins with at most; None: a lone node holds all."""
        return None if self.nodes == 1 else -(-self.stages // self.nodes)

    @property
    def spare_stages_a_node(self) -> int:
        """How many more each node may hold, so that the others can do the work of one that disappears."""
        if self.nodes == 1:
            return 0
        usual, of_the_others = -(-self.stages // self.nodes), -(-self.stages // (self.nodes - 1))
        return min(self.stages, max(usual + 1, of_the_others)) - usual


def demo_folder(data_dir: Path, options: DemoOptions) -> Path:
    """Data folder of the demo; each folder of own text gets one of its own, so that runs do not mix."""
    base = data_dir / DEMO_FOLDER
    if options.stages > 1:
        base /= f"stages-{options.stages}"
    if options.text_folder is None:
        return base
    return base / f"text-{sha256(str(options.text_folder.resolve()).encode()).hexdigest()[:12]}"


def demo_folders(data_dir: Path) -> tuple[Path, ...]:
    """Data folders of all demos that were started, whatever their options; of a swarm, that of the first node."""
    base = data_dir / DEMO_FOLDER
    kinds = ("text-*", "stages-*", "stages-*/text-*")
    found = (base, *(folder for kind in kinds for folder in sorted(base.glob(kind))))
    return tuple(folder for folder in found if (folder / WALLET_FILE).exists())


def demo_token(folder: Path) -> str:
    """The throw-away wallet of this demo folder: 64 hex digits, made on first use, so that a restart resumes."""
    file = folder / WALLET_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            temporary = folder / f".{WALLET_FILE}.{os.getpid()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                stream.write(secrets.token_hex(32))
            temporary.replace(file)
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StorageError(
            f"Cannot use the demo folder {folder}: {error}.", "Name a writable one with --data-dir."
        ) from error


class DemoData:
    """The embedded Genesis folder and the loopback server that stands in for the CDN."""

    def __init__(self, folder: Path, options: DemoOptions, wallet: Wallet) -> None:
        self._folder = folder / "genesis"
        self._options = options
        self._wallet = wallet
        self._server: GenesisServer | None = None

    def build(self, progress: StageProgress) -> BuiltGenesis:
        """Build the folder, or reuse it. Raises DataError or StorageError."""
        text = self._options.text_folder
        source = StandardLibraryText() if text is None else FolderText(text)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return build_genesis(source, self._folder, self._wallet, now=now, progress=progress)

    def serve(self) -> str:
        """Start the server; the URL of the data set."""
        self._server = GenesisServer(self._folder)
        return self._server.start()

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()
