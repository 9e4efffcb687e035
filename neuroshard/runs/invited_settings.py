"""The settings of a node that starts with an invitation: its run, peers and data come from the invitation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from neuroshard.config.loading import LoadedSettings
from neuroshard.errors import UsageError
from neuroshard.identity.invitations import FILE_SUFFIX, MAX_CODE_CHARACTERS, Invitation, InvitationError
from neuroshard.identity.invitations import read_invitation as read_code
from neuroshard.network.libp2p.addresses import Scope, is_near, parse_address, scope_of


@dataclass(frozen=True)
class InvitedSettings:
    """Settings, and the invitation that completed them, if any."""

    loaded: LoadedSettings
    invitation: Invitation | None = None


def invited_settings(loaded: LoadedSettings) -> InvitedSettings:
    """Complete settings with the invitation in `invite`. Values that the owner gave stay.

    Raises InvitationError with the reason against it, and UsageError if `run` names another run.
    """
    settings = loaded.settings
    if settings.invite is None:
        return InvitedSettings(loaded)
    invitation = read_invitation_text(settings.invite.get_secret_value())
    if settings.run is not None and settings.run != invitation.run_id:
        raise UsageError(
            f"The invitation is to run {invitation.run_id[:16]}, but run {settings.run[:16]} is named as well.",
            "Leave out --run.",
        )
    update: dict[str, object] = {"run": invitation.run_id}
    near = _near_peers(invitation.peers, is_local=ip_address(settings.p2p_host).is_loopback)
    if invitation.peers and not near and not settings.peer:
        raise InvitationError(
            "The invitation leads to private addresses that are not on this computer's network.",
            "Join from the same local network, or ask for an invitation with a public address.",
        )
    update["peer"] = tuple(dict.fromkeys((*settings.peer, *near)))
    if invitation.data and loaded.sources["genesis"] == "default":
        update["genesis"] = invitation.data[0]
    sources = {**loaded.sources, **dict.fromkeys(update, loaded.sources["invite"])}
    completed = replace(loaded, settings=settings.model_copy(update=update), sources=sources)
    return InvitedSettings(completed, invitation)


def read_invitation_text(text: str) -> Invitation:
    """Read an invitation from a code, a link, or the path of a file. Raises InvitationError."""
    text = text.strip()
    if "://" in text or not (text.endswith(FILE_SUFFIX) or _is_file(text)):
        return read_code(text)
    try:
        with Path(text).expanduser().open(encoding="ascii", errors="replace") as stream:
            return read_code(stream.read(4 * MAX_CODE_CHARACTERS))
    except OSError as error:
        raise InvitationError(f"The file {text} cannot be read: {error.strerror}.", "Check the path.") from error


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # most codes are longer than the name of a file may be
        return False


def _near_peers(peers: tuple[str, ...], *, is_local: bool) -> tuple[str, ...]:
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
