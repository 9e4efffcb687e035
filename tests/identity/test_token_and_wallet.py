from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mnemonic import Mnemonic

from neuroshard.errors import TokenError
from neuroshard.identity import TokenSecret, Wallet, new_phrase, parse_token
from neuroshard.identity.signing import SigningKey

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text("utf-8"))


def pbkdf2(phrase: str, passphrase: str) -> str:
    return hashlib.pbkdf2_hmac("sha512", phrase.encode(), b"mnemonic" + passphrase.encode(), 2048).hex()


def hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 by hand, no salt, one output block."""
    pseudo_random_key = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(pseudo_random_key, info + b"\x01", "sha256")


@pytest.mark.parametrize("vector", VECTORS["bip39"], ids=lambda v: v["entropy"][:8])
def test_official_bip39_phrases_give_the_standard_seed(vector: dict[str, str]) -> None:
    secret = parse_token(vector["phrase"])
    assert secret.kind == "phrase"
    assert pbkdf2(vector["phrase"], "TREZOR") == vector["seed_with_passphrase_TREZOR"]  # the derivation is the standard
    assert secret.seed.hex() == pbkdf2(vector["phrase"], "")
    assert secret.warning is None


@pytest.mark.parametrize("vector", VECTORS["tokens"], ids=lambda v: v["token"][:12])
def test_a_token_leads_to_the_same_wallet_for_ever(vector: dict[str, str]) -> None:
    secret = parse_token(vector["token"])
    wallet = Wallet.from_secret(secret)
    assert secret.kind == vector["kind"]
    assert wallet.public_key.hex() == vector["public_key"]
    assert wallet.wallet_id == vector["wallet_id"] == hashlib.sha256(wallet.public_key).hexdigest()[:32]


def test_the_wallet_key_is_hkdf_of_the_secret() -> None:
    secret = TokenSecret("hex", bytes(range(32)))
    expected = SigningKey.from_seed(hkdf_sha256(secret.seed, b"neuroshard/wallet/ed25519/1"))
    assert Wallet.from_secret(secret).public_key == expected.public_key


def test_case_spacing_and_unicode_form_do_not_change_the_wallet() -> None:
    phrase = VECTORS["bip39"][3]["phrase"]
    assert parse_token(f"  {phrase.upper().replace(' ', '   ')}\n") == parse_token(phrase)
    assert parse_token("caf\u00e9 token that is long") == parse_token("cafe\u0301 token that is long")
    assert parse_token("AB" * 32) == parse_token("ab" * 32)


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_an_empty_token_is_refused(text: str) -> None:
    with pytest.raises(TokenError, match="empty"):
        parse_token(text)


def test_a_token_of_a_megabyte_is_refused() -> None:
    with pytest.raises(TokenError, match="characters"):
        parse_token("x" * 1_000_000)


def test_an_unknown_word_is_named() -> None:
    words = VECTORS["bip39"][0]["phrase"].split()
    words[4] = "abandonn"
    with pytest.raises(TokenError, match=r"Word 5 .*'abandonn'"):
        parse_token(" ".join(words))


@pytest.mark.parametrize("count", [10, 11, 13, 14, 16, 23, 25])
def test_a_phrase_with_a_lost_or_doubled_word_is_refused(count: int) -> None:
    with pytest.raises(TokenError, match=f"has {count}"):
        parse_token(" ".join(["zoo"] * count))


@pytest.mark.parametrize("text", ["a" * 63, "0" * 65, "0x" + "ab" * 32])
def test_a_hex_key_with_a_wrong_length_is_refused(text: str) -> None:
    with pytest.raises(TokenError, match="64 hex digits"):
        parse_token(text)


@settings(max_examples=60, deadline=None)
@given(entropy=st.binary(min_size=16, max_size=16), position=st.integers(0, 11), other=st.integers(0, 2047))
def test_a_changed_word_is_an_error_unless_the_checksum_happens_to_fit(
    entropy: bytes, position: int, other: int
) -> None:
    mnemonic = Mnemonic("english")
    words = mnemonic.to_mnemonic(entropy).split()
    words[position] = mnemonic.wordlist[other]
    if mnemonic.check(" ".join(words)):
        assert parse_token(" ".join(words)).kind == "phrase"
    else:
        with pytest.raises(TokenError, match="checksum"):
            parse_token(" ".join(words))


@pytest.mark.parametrize(("token", "warned"), [("hello", True), ("a" * 40, True), ("k9#Lw2!vXq7@Zr4$Tn8&", False)])
def test_a_short_or_simple_text_token_is_accepted_with_a_warning(token: str, warned: bool) -> None:
    secret = parse_token(token)
    assert secret.kind == "text"
    assert len(secret.seed) == 32
    assert (secret.warning is not None) == warned


def test_secrets_do_not_show_in_a_repr() -> None:
    secret = parse_token("00" * 32)
    assert "\\x00" not in repr(secret)
    assert repr(Wallet.from_secret(secret)) == "Wallet()"


@pytest.mark.parametrize("words", [12, 24])
def test_a_new_phrase_is_a_token_and_never_the_same(words: int) -> None:
    phrases = {new_phrase(words) for _ in range(8)}
    assert len(phrases) == 8
    assert all(len(p.split()) == words and parse_token(p).kind == "phrase" for p in phrases)


def test_a_new_phrase_has_12_or_24_words() -> None:
    with pytest.raises(ValueError, match="12 or 24"):
        new_phrase(13)
