"""The wallets that may take part in a run of friends, from the passes and revocations that this node knows. Pure.

Every member keeps its own register: a wallet counts from the first pass that the member sees, and an invitation admits
no more wallets than it has places. If several wallets took the last place at members that had no connection, these
disagree. The owner's node decides: it signs that the places of the wallets that it saw last are void. With that word
the place goes to the wallet that waits for it.
"""

from __future__ import annotations

from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.identity.invitations import InvitationError, InvitationGrant, MemberPass, check_date, read_revocation
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import RunId, WalletId

MAX_MEMBERS = 20_000
MAX_REVOCATIONS = 4096
MAX_EXCESS = 16  # wallets without a place, for the owner to decide, per invitation of the owner
ASK_FOR_ONE = "Ask the owner of the run for an invitation."


class PassRegister:
    """The passes and revocations of one run. The owner's wallet needs no pass."""

    def __init__(self, run_id: RunId, owner: bytes) -> None:
        """`owner` is the public key that signed the run."""
        self.run_id = run_id
        self.owner = owner
        self.owner_id = wallet_id_of(owner)
        self._passes: dict[WalletId, MemberPass] = {}
        self._used: dict[bytes, set[WalletId]] = {}  # by the key of the invitation
        self._revocations: dict[bytes, bytes] = {}  # signed, by the key of the invitation or the wallet, or the place
        self._signed: set[bytes] = set()  # the same ones
        self._excess: dict[WalletId, MemberPass] = {}
        self._removed: set[WalletId] = set()  # wallets whose key is revoked

    def admit(self, data: bytes, now: float, *, is_vouched: bool = False) -> MemberPass:
        """Check a pass and record it. Raises InvitationError with the reason against it.

        An invitation that has expired admits no wallet, unless `is_vouched`: a member that knows the pass from earlier
        handed it over.
        """
        member_pass = MemberPass.read(data)
        wallet = member_pass.wallet_id
        known = self._passes.get(wallet)
        if known is not None and not self._is_revoked(known):
            return known
        member_pass.verify(self.run_id, self.owner)
        if self._is_revoked(member_pass):
            raise InvitationError(self._reason(member_pass), ASK_FOR_ONE)
        if member_pass.statement.issued_at > now + MAX_CLOCK_SKEW_SECONDS:
            raise InvitationError("A pass is dated in the future.", "Check the clocks of both computers.")
        if not is_vouched:
            check_date(member_pass.not_after, now)
        if (used_up := self._used_up(member_pass)) is not None:
            if is_vouched:
                self._note_excess(member_pass)
            wallets = "1 wallet" if used_up.uses == 1 else f"{used_up.uses:,} wallets"
            raise InvitationError(f"The invitation is used up: it was for {wallets}.", ASK_FOR_ONE)
        if len(self._passes) >= MAX_MEMBERS:
            raise InvitationError(f"The run has {MAX_MEMBERS:,} members, the most that a node keeps.")
        self._record(member_pass)
        return member_pass

    def _used_up(self, member_pass: MemberPass) -> InvitationGrant | None:
        """The invitation of a pass that has no place for its wallet, if there is one."""
        for grant in member_pass.grants:
            used = self._used.get(grant.invitation, set())
            if member_pass.wallet_id not in used and len(used) >= grant.uses:
                return grant
        return None

    def _record(self, member_pass: MemberPass) -> None:
        for grant in member_pass.grants:
            self._used.setdefault(grant.invitation, set()).add(member_pass.wallet_id)
        self._passes[member_pass.wallet_id] = member_pass

    def revoke(self, data: bytes) -> bool:
        """Record a revocation that the owner signed; return whether it is new. Raises InvitationError.

        Wallets that wait for a place which it makes free have it from now on.
        """
        if data in self._signed:
            return False  # before the signature, which costs most: the node reads its own file again and again
        revocation = read_revocation(data, self.run_id, self.owner)
        if revocation.key in self._revocations or len(self._revocations) >= MAX_REVOCATIONS:
            return False
        self._revocations[revocation.key] = data
        self._signed.add(data)
        self._removed.add(wallet_id_of(revocation.key))
        for known in self._passes.values():
            if known.place == revocation.key:  # another wallet has this place
                for grant in known.grants:
                    self._used[grant.invitation].discard(known.wallet_id)
        for waiting in self.excess:
            if self._used_up(waiting) is None and len(self._passes) < MAX_MEMBERS:
                self._record(waiting)
        return True

    @property
    def excess(self) -> tuple[MemberPass, ...]:
        """Valid passes that a member accepts, although the invitation has no place left here. The owner decides."""
        waiting = (known for wallet, known in self._excess.items() if self.pass_of(wallet) is None)
        return tuple(known for known in waiting if not self._is_revoked(known))

    def _note_excess(self, member_pass: MemberPass) -> None:
        root = member_pass.grants[-1].invitation
        if sum(known.grants[-1].invitation == root for known in self._excess.values()) < MAX_EXCESS:
            self._excess[member_pass.wallet_id] = member_pass

    def is_removed(self, wallet: WalletId) -> bool:
        """Whether the owner has revoked a wallet, or the invitation of its pass."""
        known = self._passes.get(wallet)
        return wallet in self._removed or (known is not None and self._is_revoked(known))

    def removal(self, wallet: WalletId) -> str:
        """The sentence about a wallet that the owner has removed, otherwise ""."""
        if not self.is_removed(wallet):
            return ""
        known = self._passes.get(wallet)
        return f"{_REVOKED if known is None else self._reason(known)} {ASK_FOR_ONE}"

    def refusal(self, wallet: WalletId) -> str:
        """The reason why a wallet may not take part; "" if it may."""
        if wallet == self.owner_id:
            return ""
        known = self._passes.get(wallet)
        if known is None:
            return f"Wallet {wallet[:8]} has no pass for this run of friends. {ASK_FOR_ONE}"
        return f"{self._reason(known)} {ASK_FOR_ONE}" if self._is_revoked(known) else ""

    def pass_of(self, wallet: WalletId) -> MemberPass | None:
        """The valid pass of a wallet, if any."""
        known = self._passes.get(wallet)
        return None if known is None or self._is_revoked(known) else known

    def passes(self) -> tuple[MemberPass, ...]:
        """All passes that are not revoked."""
        return tuple(known for known in self._passes.values() if not self._is_revoked(known))

    def revocations(self) -> tuple[bytes, ...]:
        """All signed revocations."""
        return tuple(self._revocations.values())

    def _is_revoked(self, member_pass: MemberPass) -> bool:
        return any(key in self._revocations for key in member_pass.ending_keys)

    def _reason(self, revoked: MemberPass) -> str:
        return _TAKEN if revoked.place in self._revocations else _REVOKED


_TAKEN = "The invitation is used up: the owner's computer saw another wallet with it first."
_REVOKED = "The owner of the run ended this membership: the invitation or the wallet is revoked."
