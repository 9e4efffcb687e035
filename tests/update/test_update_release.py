"""The description of a release: what is read, what is refused, and how an offer is judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.update.checking import platform_name
from neuroshard.update.release import (
    AvailableUpdate,
    Release,
    SignedArchive,
    UpdateRefusedError,
    judge,
    read_release,
    safe_url,
    version_number,
)

DESCRIPTION = {"version": "0.2.0", "minimal_version": "0.1.0", "unpacked_size": 5000, "notes": "Better."}
DIGEST = "ab" * 32
HERE = "linux-x86_64"


def test_a_description_comes_back_whole() -> None:
    assert read_release(DESCRIPTION) == Release("0.2.0", "0.1.0", 5000, "Better.")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "0.2", r"\$\.version"),
        ("version", "0.2.0/../../x", r"\$\.version"),
        ("minimal_version", "latest", r"\$\.minimal_version"),
        ("unpacked_size", 0, r"\$\.unpacked_size"),
        ("unpacked_size", 10**15, r"\$\.unpacked_size"),
        ("unpacked_size", True, r"\$\.unpacked_size"),
        ("notes", "x" * 5000, r"\$\.notes"),
        ("notes", 3, r"\$\.notes"),
        ("extra", 1, "unknown field `extra`"),
    ],
)
def test_a_field_that_cannot_be_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(UpdateRefusedError, match=words):
        read_release({**DESCRIPTION, name: value})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_nonsense_is_refused_in_words(description: object) -> None:
    with pytest.raises(UpdateRefusedError, match="The release cannot be read"):
        read_release(description)


@pytest.mark.parametrize(
    ("size", "digest", "base"),
    [
        (0, DIGEST, "https://a"),
        (10**12, DIGEST, "https://a"),
        (5, "../x", "https://a"),
        (5, DIGEST, "https://" + 2000 * "a"),
    ],
)
def test_an_archive_that_cannot_be_is_refused(size: int, digest: str, base: str) -> None:
    with pytest.raises(UpdateRefusedError, match="The release cannot be read"):
        judge(SignedArchive(size, digest, DESCRIPTION), base, current="0.1.0", platform=HERE)


def test_a_newer_version_is_offered_and_the_same_or_an_older_one_is_not() -> None:
    update = judged(current="0.1.0")
    assert update is not None
    assert (update.version, update.notes, update.artefact.size) == ("0.2.0", "Better.", 9)
    assert update.artefact.url == f"https://a/b/targets/{DIGEST}.neuroshard-linux-x86_64.update.tar.gz"
    assert judged(current="0.2.0") is None
    assert judged(current="0.10.0") is None


def test_what_is_no_update_for_this_computer_is_refused() -> None:
    with pytest.raises(UpdateRefusedError, match="too old to update itself") as refused:
        judged(current="0.0.9")
    assert "installer" in refused.value.action
    with pytest.raises(UpdateRefusedError, match="no version for plan9-mips"):
        judge(None, "https://a", current="0.1.0", platform="plan9-mips")


@pytest.mark.parametrize("url", ["http://releases.example.org/", "file:///etc/passwd", "https://", "ftp://a", "", "x"])
def test_an_address_that_others_could_read_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="https"):
        safe_url(url)


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


def judged(*, current: str) -> AvailableUpdate | None:
    return judge(SignedArchive(9, DIGEST, DESCRIPTION), "https://a/b/", current=current, platform=HERE)
