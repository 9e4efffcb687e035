"""The wallet that a wizard is about to store: made or typed in, and proved to be written down. Pure but for chance."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import SecretStr

from neuroshard.api.problems import WrongFieldsError
from neuroshard.errors import TokenError
from neuroshard.identity import Wallet, new_phrase, parse_token
from neuroshard.types import WalletId

ASKED_BACK = 3
SHORTEST_TEXT = 8
WalletOrigin = Literal["created", "entered", "found"]


@dataclass(frozen=True)
class DraftWallet:
    """A wallet that nothing on this computer stores yet, unless it was found here."""

    origin: WalletOrigin
    wallet_id: WalletId
    token: SecretStr
    asked: tuple[int, ...] = ()  # places of the words that the owner must give back, from 1
    is_confirmed: bool = True
    warning: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What the owner must write down now; nothing once that was proved."""
        return () if self.is_confirmed else tuple(self.token.get_secret_value().split())


def created_wallet() -> DraftWallet:
    """A new wallet of twelve words, three of which will be asked back."""
    phrase = new_phrase(12)
    places = sorted(secrets.SystemRandom().sample(range(1, 13), ASKED_BACK))
    wallet = Wallet.from_secret(parse_token(phrase))
    return DraftWallet("created", wallet.wallet_id, SecretStr(phrase), tuple(places), is_confirmed=False)


def entered_wallet(text: str, *, is_text: bool, origin: WalletOrigin = "entered") -> DraftWallet:
    """The wallet of a phrase or key that the owner has typed; another text only when that is said to be meant.

    Raises WrongFieldsError for the field `phrase`.
    """
    try:
        secret = parse_token(text)
    except TokenError as error:
        raise WrongFieldsError(("phrase", f"{error.message} {error.action}".strip())) from None
    token = text.strip()
    if secret.kind == "text" and not is_text:
        count = len(token.split())
        has = f"{count} word{'' if count == 1 else 's'}"
        raise WrongFieldsError(("phrase", f"A wallet phrase has 12 or 24 words; this text has {has}."))
    if secret.kind == "text" and origin == "entered" and len(token) < SHORTEST_TEXT:
        raise WrongFieldsError(("phrase", f"A token has at least {SHORTEST_TEXT} characters: others would guess it."))
    wallet = Wallet.from_secret(secret)
    return DraftWallet(origin, wallet.wallet_id, SecretStr(token), warning=secret.warning)


def confirmed_wallet(wallet: DraftWallet, answers: tuple[str, ...]) -> DraftWallet:
    """The wallet once its owner gave the asked words back. Raises WrongFieldsError, one entry for each wrong word."""
    if wallet.is_confirmed:
        return wallet
    words = wallet.words
    given = (*answers, *[""] * len(wallet.asked))
    wrong = [
        (f"words.{index}", f"Word {place} is another one." if answer.strip() else f"Word {place} is missing.")
        for index, (place, answer) in enumerate(zip(wallet.asked, given, strict=False))
        if answer.strip().lower() != words[place - 1]
    ]
    if wrong:
        raise WrongFieldsError(*wrong)
    return replace(wallet, is_confirmed=True)
