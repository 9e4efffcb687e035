"""Pushes an exported model to a hub that speaks the protocol of huggingface.co."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from neuroshard.errors import NetworkRefusedError, UsageError

PUBLIC_HUB = "https://huggingface.co"
KEPT = "The export is complete and was kept. Fix the cause, export to a new folder and push again."


def hub_token(file: Path | None) -> str:
    """Return the token of the user at the hub, from a file or from HF_TOKEN. Raises UsageError without one."""
    token = os.environ.get("HF_TOKEN", "") if file is None else file.read_text(encoding="utf-8")
    if not token.strip():
        raise UsageError("There is no token for the hub.", "Set HF_TOKEN, or name a file: --hub-token-file FILE.")
    return token.strip()


def require_hub_library(hub: str) -> None:
    """Raise UsageError with the package to install when `huggingface_hub` is missing."""
    _library(hub)


def require_private_way(hub: str) -> None:
    """Raise UsageError for a hub to which the user's token would travel in plain text."""
    from neuroshard.update.release import safe_url  # slow, and needed only here

    try:
        safe_url(hub)
    except ValueError as error:
        raise UsageError(
            f"--hub: {error}, and others could read your token on the network.", "Use https://."
        ) from error


def push(files: Mapping[str, Path], repository: str, hub: str, token: str, *, is_public: bool) -> str:
    """Upload the files under their names to a repository, which is created if it does not exist. Returns its address.

    Raises NetworkRefusedError if the hub refuses or cannot be reached.
    """
    library = _library(hub)
    # The base classes of the library's own error are those of the HTTP library that it uses, for lost connections too.
    transport_failures: tuple[type[Exception], ...] = import_module("huggingface_hub.errors").HfHubHTTPError.__bases__
    try:
        client = library.HfApi(endpoint=hub, token=token, library_name="neuroshard")
        client.create_repo(repository, private=not is_public, exist_ok=True)
        additions = [library.CommitOperationAdd(name, str(path)) for name, path in files.items()]
        client.create_commit(repository, additions, commit_message="Add the exported model")
    except (*transport_failures, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300].replace(token, "TOKEN")
        raise NetworkRefusedError(f"{hub} did not accept {repository}: {reason}", KEPT) from error
    return f"{hub.rstrip('/')}/{repository}"


def _library(hub: str) -> Any:
    if hub.rstrip("/") != PUBLIC_HUB:
        os.environ["HF_HUB_DISABLE_XET"] = "1"  # other hubs have no storage of this kind; read at the first import
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise UsageError(
            "--push needs huggingface_hub, which is not installed.", "Install it: pip install 'neuroshard[export]'"
        ) from error
