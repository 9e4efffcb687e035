"""The passes and wallets that the owner has revoked in the organiser's data folder: `run revoke` and `run remove`."""

from __future__ import annotations

import logging

from neuroshard.errors import StorageError
from neuroshard.identity.invitations import InvitationError, MemberPass, read_revocation
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.types import WalletId

_LOG = logging.getLogger(__name__)


class EndedPasses:
    """The owner's revocations. One that was read once counts until the process ends, whatever happens to the file."""

    def __init__(self, offer: RunOffer, stored: StoredPasses | None) -> None:
        """Without `stored`, no pass has ended. Raises StorageError."""
        self._offer = offer
        self._stored = stored
        self._read: tuple[bytes, ...] = ()
        self._keys: set[bytes] = set()
        self._wallets: set[WalletId] = set()
        self._take()

    def refusal(self, wallet: WalletId, shown: MemberPass | None) -> str:
        """The reason why a wallet may not join, also with a pass; "" if the owner ended neither."""
        try:
            self._take()
        except StorageError as error:
            _LOG.error("The owner's newest revocations are not known: %s", error)
        is_ended = shown is not None and not self._keys.isdisjoint(shown.ending_keys)
        return _ENDED if is_ended or wallet in self._wallets else ""

    def _take(self) -> None:
        signed = () if self._stored is None else self._stored.issued().revocations
        if signed == self._read:
            return
        for data in set(signed).difference(self._read):
            try:
                key = read_revocation(data, self._offer.run_id, self._offer.initial.owner_public_key).key
            except InvitationError as error:
                _LOG.warning("A stored revocation is not used: %s", error)
                continue
            self._keys.add(key)
            self._wallets.add(wallet_id_of(key))
        self._read = signed


_ENDED = "The owner of the run ended this membership: the invitation or the wallet is revoked."
