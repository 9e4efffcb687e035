"""The signed manifest: what is believed, what is refused, and how an offer is judged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from neuroshard.identity import canonical_json
from neuroshard.identity.signing import SigningKey, purpose_message
from neuroshard.update.checking import RELEASE_KEY, platform_name
from neuroshard.update.manifest import (
    MAX_MANIFEST_BYTES,
    SeenManifest,
    UpdateManifest,
    UpdateRefusedError,
    judge,
    newest_seen,
    read_update_manifest,
    version_number,
)
from tests.worlds.releases import DAY, NOW, PUBLISHER, manifest_of

MANIFEST = manifest_of("0.2.0", b"archive", "https://releases.example.org/n.tar.gz")
HERE = platform_name()
VALUE = msgspec.to_builtins(MANIFEST)
ARTEFACT = VALUE["artefacts"][HERE]


def test_a_signed_manifest_comes_back_whole() -> None:
    assert read_update_manifest(MANIFEST.signed(PUBLISHER), PUBLISHER.public_key) == MANIFEST


def test_the_pinned_key_is_a_key_whose_secret_is_nowhere_here() -> None:
    assert len(bytes.fromhex(RELEASE_KEY)) == 32
    with pytest.raises(UpdateRefusedError, match="not signed by the publisher"):
        read_update_manifest(MANIFEST.signed(PUBLISHER), bytes.fromhex(RELEASE_KEY))


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_changed_bit_is_believed(position: int, bit: int) -> None:
    data = bytearray(MANIFEST.signed(PUBLISHER))
    data[position % len(data)] ^= 1 << bit
    try:
        read = read_update_manifest(bytes(data), PUBLISHER.public_key)
    except UpdateRefusedError:
        return
    assert read == MANIFEST  # the same value written differently


@given(st.binary(max_size=300))
def test_nonsense_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(UpdateRefusedError, match="manifest"):
        read_update_manifest(data, PUBLISHER.public_key)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("format", 2, r"\$\.format"),
        ("version", "0.2", r"\$\.version"),
        ("version", "0.2.0/../../x", r"\$\.version"),
        ("minimal_version", "latest", r"\$\.minimal_version"),
        ("issued_at", -1, r"\$\.issued_at"),
        ("expires_at", 0, "expires before"),
        ("expires_at", 10**400, r"\$\.expires_at"),
        ("notes", "x" * 5000, r"\$\.notes"),
        ("notes", 3, r"\$\.notes"),
        ("artefacts", [], r"\$\.artefacts"),
        ("artefacts", {str(number): ARTEFACT for number in range(33)}, r"length <= 32 - at `\$\.artefacts"),
        ("extra", 1, "unknown field `extra`"),
    ],
)
def test_a_field_that_cannot_be_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(UpdateRefusedError, match=words):
        read_update_manifest(_signed({**VALUE, name: value}), PUBLISHER.public_key)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "http://releases.example.org/n.tar.gz"),
        ("url", "file:///etc/passwd"),
        ("url", "https://"),
        ("size", 0),
        ("size", 10**12),
        ("size", True),
        ("size", 1.5),
        ("unpacked_size", 10**15),
        ("sha256", "ab"),
    ],
)
def test_an_artefact_that_cannot_be_is_refused(name: str, value: object) -> None:
    artefact = {**ARTEFACT, name: value}
    with pytest.raises(UpdateRefusedError, match=rf"artefacts\[\.\.\.\]\.{name}" if name != "url" else "https"):
        read_update_manifest(_signed({**VALUE, "artefacts": {HERE: artefact}}), PUBLISHER.public_key)


def test_an_oversized_manifest_is_not_even_parsed() -> None:
    with pytest.raises(UpdateRefusedError, match=f"at most {MAX_MANIFEST_BYTES}"):
        read_update_manifest(b" " * (MAX_MANIFEST_BYTES + 1), PUBLISHER.public_key)


def test_a_signature_for_another_purpose_does_not_count() -> None:
    value = VALUE
    signature = PUBLISHER.sign(purpose_message("run-parameters", value)).hex()
    with pytest.raises(UpdateRefusedError, match="not signed"):
        read_update_manifest(canonical_json({"manifest": value, "signature": signature}), PUBLISHER.public_key)


def test_a_stranger_s_signature_does_not_count() -> None:
    with pytest.raises(UpdateRefusedError, match="not signed"):
        read_update_manifest(MANIFEST.signed(SigningKey.generate()), PUBLISHER.public_key)


def test_a_newer_version_is_offered_and_the_same_or_an_older_one_is_not() -> None:
    found = judged(MANIFEST, current="0.1.0")
    assert found is not None
    assert (found.version, found.artefact) == ("0.2.0", MANIFEST.artefacts[HERE])
    assert judged(MANIFEST, current="0.2.0") is None
    assert judged(MANIFEST, current="0.10.0") is None


@pytest.mark.parametrize(
    ("changes", "seen", "words"),
    [
        ({"expires_at": NOW - 1}, SeenManifest(), "expired"),
        ({"issued_at": NOW + 2 * DAY}, SeenManifest(), "future"),
        ({}, SeenManifest("0.3.0", 0), "older than the one of 0.3.0"),
        ({}, SeenManifest("0.2.0", NOW), "older than the one"),
        ({"minimal_version": "0.1.5"}, SeenManifest(), "too old"),
        ({"artefacts": {}}, SeenManifest(), "not for"),
    ],
)
def test_what_is_no_update_is_refused(changes: dict[str, object], seen: SeenManifest, words: str) -> None:
    with pytest.raises(UpdateRefusedError, match=words):
        judged(replace(MANIFEST, **changes), current="0.1.0", seen=seen)  # type: ignore[arg-type]


def test_what_was_seen_only_grows() -> None:
    seen = newest_seen(MANIFEST, SeenManifest("0.10.0", NOW + 5))
    assert seen == SeenManifest("0.10.0", NOW + 5)
    assert newest_seen(MANIFEST, SeenManifest()) == SeenManifest("0.2.0", MANIFEST.issued_at)


def test_versions_compare_by_number() -> None:
    assert version_number("0.10.0") > version_number("0.9.12")
    for text in ("1.0", "1.0.0-rc1", "", "1.0.0\n", "99999.0.0"):
        with pytest.raises(ValueError, match="not a version"):
            version_number(text)


@pytest.mark.parametrize(
    ("system", "processor", "name"),
    [("win32", "AMD64", "win32-x86_64"), ("darwin", "arm64", "darwin-arm64"), ("linux", "aarch64", "linux-arm64")],
)
def test_platforms_have_one_name_each(system: str, processor: str, name: str) -> None:
    assert platform_name(system, processor) == name


def judged(manifest: UpdateManifest, *, current: str, seen: SeenManifest | None = None) -> object:
    return judge(manifest, current=current, platform=HERE, seen=seen or SeenManifest(), now=NOW)


def _signed(value: object) -> bytes:
    signature = PUBLISHER.sign(purpose_message("update-manifest", value)).hex()  # type: ignore[arg-type]
    return canonical_json({"manifest": value, "signature": signature})  # type: ignore[dict-item]
