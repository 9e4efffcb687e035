"""The settings of a node that starts with an invitation or a chosen run: run, peers and data come from there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from neuroshard.config.loading import LoadedSettings, Source
from neuroshard.errors import UsageError
from neuroshard.identity.invitations import FILE_SUFFIX, MAX_CODE_CHARACTERS, Invitation, InvitationError
from neuroshard.identity.invitations import read_invitation as read_code
from neuroshard.network.libp2p.addresses import Scope, is_near, parse_address, scope_of
from neuroshard.runs.chosen_run import ChosenRun, RunChoice, release_run
from neuroshard.types import RunId


@dataclass(frozen=True)
class InvitedSettings:
    """Settings, and the invitation that completed them, if any."""

    loaded: LoadedSettings
    invitation: Invitation | None = None
    is_chosen: bool = False  # in the wizard or the dashboard: the node waits there when the run does not admit it


def invited_settings(loaded: LoadedSettings) -> InvitedSettings:
    """Complete settings with the invitation in `invite`, or with the chosen run. Values that the owner gave stay.

    Raises InvitationError with the reason against it, UsageError if `run` names another run, and StorageError.
    """
    settings = loaded.settings
    if settings.invite is None:
        has_data = settings.genesis is not None or settings.text is not None
        chosen = RunChoice(settings.data_dir).current() or (None if has_data else release_run())
        return InvitedSettings(loaded) if chosen is None or settings.run is not None else _with_chosen(loaded, chosen)
    invitation = read_invitation_text(settings.invite.get_secret_value())
    if settings.run is not None and settings.run != invitation.run_id:
        raise UsageError(
            f"The invitation is for run {invitation.run_id[:16]}, but --run names run {settings.run[:16]}.",
            "Leave out --run.",
        )
    is_local = _is_local(loaded)
    if settings.peer:
        near = near_peers(invitation.peers, is_local=is_local)
    else:
        near = reachable_peers(invitation, is_local=is_local)
    data = invitation.data[0] if invitation.data else None
    return InvitedSettings(_completed(loaded, invitation.run_id, near, data, loaded.sources["invite"]), invitation)


def _with_chosen(loaded: LoadedSettings, chosen: ChosenRun) -> InvitedSettings:
    """Complete settings with a run that was chosen. Its places may be out of reach today, without an error."""
    near = near_peers(chosen.peers, is_local=_is_local(loaded))
    completed = _completed(loaded, chosen.run_id, near, chosen.data, "chosen run")
    invitation = None if chosen.code is None else read_code(chosen.code)
    return InvitedSettings(completed, invitation, is_chosen=True)


def _completed(
    loaded: LoadedSettings, run: RunId, peers: tuple[str, ...], data: str | None, source: Source
) -> LoadedSettings:
    settings = loaded.settings
    update: dict[str, object] = {"run": run, "peer": tuple(dict.fromkeys((*settings.peer, *peers)))}
    if data is not None and settings.genesis is None:
        update["genesis"] = data
    sources = {**loaded.sources, **dict.fromkeys(update, source)}
    return replace(loaded, settings=settings.model_copy(update=update), sources=sources)


def reachable_peers(invitation: Invitation, *, is_local: bool) -> tuple[str, ...]:
    """The peers of an invitation that can be dialled from here. Raises InvitationError if it has only other ones."""
    near = near_peers(invitation.peers, is_local=is_local)
    if invitation.peers and not near:
        raise InvitationError(
            "The invitation leads to private addresses that are not on this computer's network.",
            "Join from the same local network, or ask for an invitation with a public address.",
        )
    return near


def _is_local(loaded: LoadedSettings) -> bool:
    return ip_address(loaded.settings.p2p_host).is_loopback


def read_invitation_text(text: str) -> Invitation:
    """Read an invitation from a code, a link, or the path of a file. Raises InvitationError."""
    return read_code(text_of(text))


def text_of(given: str) -> str:
    """The text of a code or a link, or the content of a file. Raises InvitationError if it cannot be read."""
    text = given.strip()
    if text.startswith("file:"):  # as desktops pass a file that was clicked
        text = url2pathname(urlsplit(text).path)
    elif "://" in text or not (text.endswith(FILE_SUFFIX) or _is_file(text)):
        return text
    try:
        with Path(text).expanduser().open(encoding="ascii", errors="replace") as stream:
            return stream.read(4 * MAX_CODE_CHARACTERS)
    except OSError as error:
        raise InvitationError(f"The file {text} cannot be read: {error.strerror}.", "Check the path.") from error


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # most codes are longer than the name of a file may be
        return False


def near_peers(peers: tuple[str, ...], *, is_local: bool) -> tuple[str, ...]:
    """The addresses that mean the same place here as for the inviter: public ones, and those of this local network.

    Addresses of the computer itself count only if the whole network is on it (`is_local`).
    """

    def is_reachable(text: str) -> bool:
        host = parse_address(text).host
        if text.startswith("/dns"):
            return True
        if scope_of(host) is Scope.COMPUTER:
            return is_local
        return scope_of(host) is Scope.WORLD or is_near(host)

    return tuple(peer for peer in peers if is_reachable(peer))
