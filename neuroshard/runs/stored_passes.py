"""Passes, revocations and invitations of a run that this computer stores next to the run, readable by its user only.

A running node writes the passes; the commands `run invite` and `run revoke` write the invitations.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from neuroshard.config.state_file import StateFile
from neuroshard.errors import UsageError
from neuroshard.identity import NodeIdentity, Wallet
from neuroshard.identity.claims import PublicKey
from neuroshard.identity.invitations import (
    MAX_LABEL_CHARACTERS,
    MAX_USES,
    Invitation,
    InvitationError,
    InvitationTerms,
    InvitedPlaces,
    InvitedTip,
    MemberPass,
    PassBytes,
    RevocationBytes,
    invite,
    invite_as_guest,
    read_revocation,
    sign_revocation,
)
from neuroshard.identity.pass_register import MAX_REVOCATIONS, PassRegister
from neuroshard.identity.signing import SEED_BYTES
from neuroshard.membership.run_members import Papers
from neuroshard.runs.offer import RunOffer
from neuroshard.types import WalletId

MAX_PAPERS_BYTES = 32 * 1024 * 1024
MAX_ISSUED = 4096
KEY_DIGITS = 8  # of an invitation's key, for people
_LOG = logging.getLogger(__name__)


class OwnPass(Struct, frozen=True):
    """The pass of this computer's wallet, and the invitation's secret if it may invite."""

    member_pass: PassBytes
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)] | None = None
    later_tip: InvitedTip | None = None  # of another invitation that this computer was given since

    @property
    def tip(self) -> InvitedTip | None:
        """The tip of the invitation that this computer was given last."""
        return self.later_tip or MemberPass.read(self.member_pass).tip


class IssuedInvitation(Struct, frozen=True):
    """An invitation that was made on this computer, without its secret."""

    label: Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]
    invitation: PublicKey
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    not_after: int


class IssuedInvitations(Struct, frozen=True):
    """The invitations made on this computer, and the owner's revocations."""

    issued: Annotated[tuple[IssuedInvitation, ...], Meta(max_length=MAX_ISSUED)] = ()
    revocations: Annotated[tuple[RevocationBytes, ...], Meta(max_length=MAX_REVOCATIONS)] = ()


@dataclass(frozen=True)
class KnownInvitation:
    """An invitation that was made on this computer, and what this computer knows of its use."""

    issued: IssuedInvitation
    left: int  # wallets that can still join with it
    state: Literal["valid", "expired", "revoked"]

    @property
    def key(self) -> str:
        """The first digits of its key, for people."""
        return self.issued.invitation.hex()[:KEY_DIGITS]


class StoredPasses:
    """The files of one run in <data-dir>/runs/joined."""

    def __init__(self, data_dir: Path, offer: RunOffer) -> None:
        folder, run_id = data_dir / "runs" / "joined", offer.run_id
        self._offer = offer
        self._own = StateFile(
            folder / f"{run_id}.pass", OwnPass, "set_aside", "this computer needs a new invitation", data_dir=data_dir
        )
        self._papers = StateFile(
            folder / f"{run_id}.members",
            Papers,
            "set_aside",
            "passes of the other members must be learned again",
            max_bytes=MAX_PAPERS_BYTES,
            data_dir=data_dir,
        )
        self._issued = StateFile(
            folder / f"{run_id}.invitations",
            IssuedInvitations,
            "fail",
            "It contains the invitations and revocations that you made: restore it, or move it away.",
            max_bytes=MAX_PAPERS_BYTES,
            data_dir=data_dir,
        )

    def register(self) -> PassRegister:
        """All that is stored, checked again. Raises StorageError."""
        register = PassRegister(self._offer.run_id, self._offer.initial.owner_public_key)
        papers, issued = self._papers.read() or Papers(), self._issued.read() or IssuedInvitations()
        for data in (*papers.revocations, *issued.revocations):
            register.revoke(data)
        for data in papers.passes:
            try:
                register.admit(data, time.time(), is_vouched=True)
            except InvitationError as error:
                _LOG.warning("A stored pass of run %s is not used: %s", self._offer.run_id[:16], error)
        return register

    def revoked_nodes(self) -> tuple[bytes, ...]:
        """The stored statements about revoked nodes, which are not checked. Raises StorageError."""
        return (self._papers.read() or Papers()).revoked_nodes

    def admissions(self) -> Papers:
        """The stored admissions and revocations of admissions, which are not checked. Raises StorageError."""
        papers = self._papers.read() or Papers()
        return Papers(admissions=papers.admissions, ended=papers.ended)

    def keep_papers(self, papers: Papers) -> None:
        """Store the passes and revocations that a running node knows. Raises StorageError."""
        self._papers.write(papers)

    def own(self, wallet: WalletId) -> OwnPass | None:
        """The stored pass of a wallet. Raises StorageError."""
        own = self._own.read()
        if own is None:
            return None
        try:
            return own if MemberPass.read(own.member_pass).wallet_id == wallet else None
        except InvitationError as error:
            _LOG.warning("The stored pass of run %s is not used: %s", self._offer.run_id[:16], error)
            return None

    def keep_own(self, own: OwnPass) -> None:
        """Store the pass of this computer's wallet. Raises StorageError."""
        self._own.write(own)

    def issued(self) -> IssuedInvitations:
        """The invitations made here and the revocations. Raises StorageError."""
        return self._issued.read() or IssuedInvitations()

    def invitations(self, now: float) -> tuple[KnownInvitation, ...]:
        """The invitations made here with the places that are left, the oldest first. Raises StorageError."""
        known, passes, owner = self.issued(), self.register().passes(), self._offer.initial.owner_public_key
        revoked = {read_revocation(each, self._offer.run_id, owner).key for each in known.revocations}
        found = list[KnownInvitation]()
        for one in known.issued:
            used = sum(any(grant.invitation == one.invitation for grant in member.grants) for member in passes)
            state = "revoked" if one.invitation in revoked else "expired" if one.not_after < now else "valid"
            found.append(KnownInvitation(one, max(0, one.uses - used), state))
        return tuple(found)

    def issue(self, wallet: Wallet, terms: InvitationTerms, places: InvitedPlaces) -> Invitation:
        """Make an invitation and record it: as the owner, or with a pass that may invite.

        Raises UsageError if the wallet may not invite or the label is in use, InvitationError, and StorageError.
        """
        with self._issued.alone():
            known = self.issued()
            if any(one.label == terms.label for one in known.issued):
                raise UsageError(f"An invitation with the label {terms.label!r} exists.", "Choose another label.")
            invitation = self._invite(wallet, terms, places)
            grant = invitation.grant
            one = IssuedInvitation(grant.label, grant.invitation, grant.uses, grant.not_after)
            self._issued.write(IssuedInvitations((*known.issued, one), known.revocations))
        return invitation

    def revoke(self, owner: Wallet, named: str) -> str:
        """Revoke the invitation with a label, or with the first digits of its key, and return its label.

        Raises UsageError if the wallet is not the owner's, or if no or several invitations are named; StorageError.
        """
        self._check_owner(owner)
        known, papers = self.issued(), self.register().passes()
        labels = {member.grants[0].invitation: member.label for member in papers}
        labels |= {one.invitation: one.label for one in known.issued}
        found = {key: label for key, label in labels.items() if _is_named(label, key, named)}
        if len(found) != 1:
            keys = ", ".join(key.hex()[:KEY_DIGITS] for key in found)
            problem = f"Several invitations are called {named!r}: {keys}." if found else f"No invitation is {named!r}."
            raise UsageError(problem, "`neuroshard run members` lists them; name one by the digits of its key.")
        ((key, label),) = found.items()
        self._revoke(owner, [key])
        return label

    def remove(self, owner: Wallet, named: str) -> tuple[MemberPass, bool]:
        """Revoke a member's wallet, named by the first digits of its id, and return its pass.

        If no other wallet joined with its invitation, that is revoked, too; the second value says whether. Raises
        UsageError if the wallet is not the owner's, or if no or several members are named; StorageError.
        """
        self._check_owner(owner)
        member = self.member(named)
        invitation, members = member.grants[0].invitation, self.register().passes()
        users = [each for each in members if any(grant.invitation == invitation for grant in each.grants)]
        is_only = len(users) == 1
        self._revoke(owner, [member.statement.wallet, *([invitation] if is_only else [])])
        return member, is_only

    def void_places(self, owner: Wallet, passes: Sequence[MemberPass]) -> None:
        """Revoke the places of passes that are one too many. Their wallets may join with other invitations.

        Raises UsageError if too many revocations exist: the rest is for the owner's own. Raises StorageError.
        """
        if len(self.issued().revocations) + len(passes) > MAX_REVOCATIONS // 4:
            raise UsageError(
                f"More wallets use invitation {passes[0].label!r} than it allows, and too many revocations are stored.",
                "Revoke it: `neuroshard run revoke`.",
            )
        self._revoke(owner, [each.place for each in passes])

    def member(self, named: str) -> MemberPass:
        """The pass of the member whose wallet id begins with these digits. Raises UsageError and StorageError."""
        found = [each for each in self.register().passes() if each.wallet_id.startswith(named.lower())]
        if len(named) < KEY_DIGITS or len(found) != 1:
            problem = "Several members' wallets begin" if len(found) > 1 else "No member's wallet begins"
            raise UsageError(
                f"{problem} with {named!r}.",
                f"`neuroshard run members` lists the wallets; give at least {KEY_DIGITS} digits.",
            )
        return found[0]

    def _check_owner(self, wallet: Wallet) -> None:
        if wallet.public_key != self._offer.initial.owner_public_key:
            raise UsageError("Only the owner of a run can end a membership.", "Use the owner's token.")

    def _revoke(self, owner: Wallet, keys: Sequence[bytes]) -> None:
        signed = tuple(sign_revocation(owner, self._offer.run_id, key, time.time()) for key in keys)
        with self._issued.alone():
            known = self.issued()
            self._issued.write(IssuedInvitations(known.issued, (*known.revocations, *signed)))

    def _invite(self, wallet: Wallet, terms: InvitationTerms, places: InvitedPlaces) -> Invitation:
        if wallet.public_key == self._offer.initial.owner_public_key:
            return invite(wallet, self._offer.run_id, terms, places, seed=secrets.token_bytes(SEED_BYTES))
        own = self.own(wallet.wallet_id)
        if own is None or own.secret is None:
            raise UsageError(
                f"Wallet {wallet.wallet_id[:8]} cannot invite to run {self._offer.run_id[:16]}.",
                "The owner's wallet can, and wallets that were invited with --may-invite.",
            )
        parent, seed = MemberPass.read(own.member_pass), secrets.token_bytes(SEED_BYTES)
        return invite_as_guest(parent, own.secret, terms, places, seed=seed)


def _is_named(label: str, key: bytes, named: str) -> bool:
    return label == named or (len(named) >= KEY_DIGITS and key.hex().startswith(named.lower()))


def entry_pass(
    offer: RunOffer,
    identity: NodeIdentity,
    stored: StoredPasses,
    invitation: Invitation | None,
    *,
    shown: bytes | None,
    now: float,
) -> bytes | None:
    """The pass with which this wallet enters a run, made from the invitation and stored if there is none yet.

    `shown` is the pass of this wallet that a peer knows from another node of the wallet. Returns None if
    the wallet needs no pass. Raises InvitationError if it has none, and StorageError.
    """
    owner, wallet = offer.initial.owner_public_key, identity.delegation.grant.wallet_public_key
    if offer.parameters.admission == "strangers" or wallet == owner:
        return None
    register, own = stored.register(), stored.own(identity.wallet_id)
    if offer.parameters.admission == "admitted" and (own, shown, invitation) == (None, None, None):
        return None  # the organiser admits it
    for known in (own, None if shown is None else OwnPass(shown)):
        if known is not None and _is_valid(register, known, identity.wallet_id, now, may_fail=invitation is not None):
            newest = _with_tip(known, offer, invitation, now)
            if newest != own:
                stored.keep_own(newest)
            return known.member_pass
    if invitation is None:
        raise InvitationError(
            f"Run {offer.run_id[:16]} is a run of friends, and this computer has no invitation to it.",
            "Ask for an invitation: its owner makes one with `neuroshard run invite`; start with --invite CODE.",
        )
    invitation.check(offer.run_id, owner, now)
    member_pass = invitation.pass_for(wallet, now)
    register.admit(member_pass, now)
    stored.keep_own(OwnPass(member_pass, invitation.secret if invitation.grant.may_invite else None))
    return member_pass


def _with_tip(own: OwnPass, offer: RunOffer, invitation: Invitation | None, now: float) -> OwnPass:
    """A valid pass with the tip of an invitation that is given as well, unless it is not valid any more."""
    if invitation is None or invitation.tip in (None, own.tip):
        return own
    try:
        invitation.check(offer.run_id, offer.initial.owner_public_key, now)
    except InvitationError:
        return own
    return msgspec.structs.replace(own, later_tip=invitation.tip)


def _is_valid(register: PassRegister, known: OwnPass, wallet: WalletId, now: float, *, may_fail: bool) -> bool:
    """Whether a pass admits the wallet. Raises InvitationError with the reason, unless `may_fail`."""
    try:
        return register.admit(known.member_pass, now, is_vouched=True).wallet_id == wallet
    except InvitationError:
        if may_fail:
            return False
        raise
