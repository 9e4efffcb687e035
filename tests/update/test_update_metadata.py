"""Attacks on the signed metadata of releases by a server on loopback: what is believed, refused and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.config.settings import Settings
from neuroshard.errors import DataUnavailableError, NeuroShardError, UsageError
from neuroshard.update import checking, metadata
from neuroshard.update.checking import UpdateMemory, look_for_update, memory_file
from neuroshard.update.metadata import LIMITS, look_at_metadata
from neuroshard.update.release import AvailableUpdate, UpdateRefusedError
from tests.worlds.file_servers import HostileServer, never_ends, serves
from tests.worlds.publishers import TARGET, TIMESTAMP, Publisher, ReleasePlace, new_key
from tests.worlds.releases import archive_of

ARCHIVE = archive_of({"neuroshard": b"x"})
DAY = 86_400.0


class Owner:
    """A computer whose program has the publisher's first root, and its mirror."""

    def __init__(self, place: ReleasePlace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.publisher, self.files = place, place.publisher, place.server.files
        self.settings = Settings(data_dir=folder, update_url=place.url)
        monkeypatch.setattr(checking, "release_root", lambda: self.publisher.anchor)

    def look(self, *, now: float | None = None, backend: str = "asyncio") -> AvailableUpdate | None:
        moment = time.time() if now is None else now
        return anyio.run(look_for_update, self.settings, "0.1.0", moment, backend=backend)

    def sees(self, version: str | None) -> None:
        update = self.look()
        assert (update.version if update else None) == version

    def refuses(self, words: str) -> NeuroShardError:
        """The refusal. It does not change the offer that this computer knows."""
        before = self.memory()
        with pytest.raises(UpdateRefusedError, match=words) as refused:
            self.look()
        assert refused.value.action
        assert self.memory().verified_at == before.verified_at
        assert self.memory().available == before.available
        return refused.value

    def memory(self) -> UpdateMemory:
        memory = memory_file(self.settings.data_dir).read()
        return memory or checking.NEVER_ASKED


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    """Version 0.2.0 is published."""
    with HostileServer() as server:
        place = ReleasePlace(server)
        place.publish("0.2.0", ARCHIVE)
        (tmp_path / "data").mkdir()
        yield Owner(place, tmp_path / "data", monkeypatch)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signed_release_is_an_update(owner: Owner, backend: str) -> None:
    update = owner.look(backend=backend)
    assert update is not None
    assert (update.version, update.notes) == ("0.2.0", "What is new in 0.2.0.")
    assert update.artefact.url == f"{owner.place.url}/targets/{update.artefact.sha256}.{TARGET}"
    assert owner.files[update.artefact.url.removeprefix(f"{owner.place.url}/")] == ARCHIVE


def test_without_a_root_of_trust_nobody_is_asked(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "release_root", lambda: None)
    with pytest.raises(UsageError, match="no root of trust for updates") as refused:
        owner.look()
    assert "by hand" in refused.value.action
    assert owner.place.server.requests == []


def test_this_repository_has_no_placeholder_of_a_root() -> None:
    root = checking.release_root()
    assert root is None or json.loads(root)["signed"]["_type"] == "root"


def test_only_the_newest_files_are_fetched_again(owner: Owner) -> None:
    owner.sees("0.2.0")
    owner.place.server.requests.clear()
    owner.sees("0.2.0")
    assert [name for name, _ in owner.place.server.requests] == ["metadata/2.root.json", TIMESTAMP]


# Keys


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
def test_a_strangers_signature_does_not_count(owner: Owner, role: str) -> None:
    stranger = new_key()
    if role == "timestamp":
        owner.publisher.renew(signer=stranger)
    else:
        setattr(owner.publisher, "release_key", stranger)  # noqa: B010 - the root does not learn of it
        owner.publisher.sign_targets()
    owner.place.put()
    owner.refuses("not signed by enough of the publisher's keys")


def test_the_timestamp_key_signs_no_release(owner: Owner) -> None:
    """It is online, so it is the one that is stolen first."""
    owner.publisher.release_key = owner.publisher.timestamp_key
    owner.place.publish("6.6.6", ARCHIVE)
    owner.refuses("not signed by enough")


@pytest.mark.parametrize("signers", [(0,), (1,), (0, 0), (0, 2), ()])
def test_a_root_below_the_threshold_of_the_old_keys_is_refused(owner: Owner, signers: tuple[int, ...]) -> None:
    """Keys 0 and 1 are the old root's; 2 and 3 are the attacker's new ones. Two must sign for each."""
    keys = [*owner.publisher.root_keys, new_key(), new_key()]
    chosen = [keys[index] for index in signers]
    owner.publisher.rotate(root_keys=keys[2:], signers=[*chosen, *keys[2:]])
    owner.place.put()
    owner.refuses("not signed by enough")


def test_a_root_below_its_own_threshold_is_refused(owner: Owner) -> None:
    keys = [*owner.publisher.root_keys, new_key(), new_key()]
    owner.publisher.rotate(root_keys=keys[2:], signers=keys[:3])
    owner.place.put()
    owner.refuses("not signed by enough")


def test_a_root_that_skips_a_version_is_refused(owner: Owner) -> None:
    owner.publisher.rotate(version=7)
    owner.place.put()
    owner.refuses("Expected root version 2")


def test_all_keys_can_be_replaced_and_an_old_program_follows(owner: Owner) -> None:
    owner.sees("0.2.0")
    for number in range(3, 6):  # three rotations while this computer was off
        owner.publisher.release_key, owner.publisher.timestamp_key = new_key(), new_key()
        owner.publisher.rotate(root_keys=(new_key(), new_key()))
        owner.place.publish(f"0.{number}.0", ARCHIVE)
    owner.sees("0.5.0")


def test_the_old_keys_are_worth_nothing_after_a_rotation(owner: Owner) -> None:
    stolen, owner.publisher.release_key = owner.publisher.release_key, new_key()
    owner.publisher.rotate()
    owner.place.publish("0.3.0", ARCHIVE)
    owner.sees("0.3.0")
    owner.place.publish("6.6.6", ARCHIVE, signer=stolen)
    owner.refuses("not signed by enough")


def test_a_mirror_that_hides_a_rotation_finds_it_remembered(owner: Owner) -> None:
    before = dict(owner.files)
    owner.publisher.timestamp_key = new_key()
    owner.publisher.rotate()
    owner.place.publish("0.3.0", ARCHIVE)
    owner.sees("0.3.0")
    owner.files.clear()
    owner.files.update(before)
    owner.refuses("not signed by enough")


def test_a_timestamp_of_a_stolen_key_far_ahead_ends_with_the_rotation(owner: Owner) -> None:
    """Fast forward: the thief signs the largest version, after which no honest one is newer."""
    owner.publisher.renew(version=2**31)
    owner.place.put()
    owner.sees("0.2.0")
    owner.publisher.renew(version=5)
    owner.place.put()
    owner.refuses("older than those seen before")
    owner.publisher.timestamp_key = new_key()
    owner.publisher.rotate()
    owner.publisher.renew(version=6)
    owner.place.put()
    owner.sees("0.2.0")


# Time


def test_an_expired_timestamp_is_a_freeze(owner: Owner) -> None:
    owner.sees("0.2.0")
    owner.publisher.renew(days=-1)
    owner.place.put()
    assert "Check the clock" in owner.refuses("have expired").action


def test_an_expired_release_is_refused(owner: Owner) -> None:
    owner.publisher.sign_targets(days=-1)
    owner.place.put()
    owner.refuses("have expired")


def test_an_expired_root_says_that_an_installer_is_needed(owner: Owner) -> None:
    owner.sees("0.2.0")
    owner.publisher.rotate(days=-1)
    owner.place.publish("0.3.0", ARCHIVE)
    assert "install the newest version by hand" in owner.refuses("root of trust expired on 20").action
    owner.publisher.rotate()  # an expired root still names its successor
    owner.place.put()
    owner.sees("0.3.0")


def test_a_clock_that_was_set_back_is_noticed(owner: Owner) -> None:
    """Otherwise the frozen metadata of then would count again."""
    owner.look()
    asked = len(owner.place.server.requests)
    owner.look(now=time.time() - 0.9 * DAY)
    with pytest.raises(UpdateRefusedError, match=r"clock shows .* at an earlier look") as refused:
        owner.look(now=time.time() - 3 * DAY)
    assert "Set the clock" in refused.value.action
    assert len(owner.place.server.requests) == asked + 2
    owner.sees("0.2.0")


def test_a_refused_look_proves_no_time(owner: Owner) -> None:
    owner.publisher.renew(days=-1)
    owner.place.put()
    with pytest.raises(UpdateRefusedError, match="expired"):
        owner.look(now=time.time() + 900 * DAY)  # a clock that is ahead
    owner.publisher.renew()
    owner.place.put()
    owner.sees("0.2.0")


# Old files, and files that do not belong together


@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
def test_older_metadata_are_a_rollback(owner: Owner, role: str) -> None:
    old = dict(owner.files)
    owner.place.publish("0.3.0", ARCHIVE)
    owner.sees("0.3.0")
    if role == "timestamp":
        owner.files.update(old)
    else:  # a thief of the timestamp key points at an old snapshot
        owner.publisher.versions["snapshot"] = 1
        owner.publisher.renew(version=99)
        owner.place.put()
    owner.refuses("older than those seen before")


def test_a_rollback_to_older_targets_is_refused(owner: Owner) -> None:
    """The release key was stolen, and an old, vulnerable version is signed into a new snapshot."""
    owner.place.publish("0.3.0", ARCHIVE)
    owner.sees("0.3.0")
    owner.publisher.versions["targets"] = 0
    owner.publisher.sign_targets()
    owner.place.put()
    owner.refuses("older than those seen before")


@pytest.mark.parametrize("role", ["snapshot", "targets"])
def test_a_file_of_another_release_does_not_fit(owner: Owner, role: str) -> None:
    """Mix and match: each file is signed and not expired, but of another release."""
    old = {name: owner.files[name] for name in ("metadata/1.snapshot.json", "metadata/1.targets.json")}
    owner.place.publish("0.3.0", ARCHIVE)
    owner.files[f"metadata/2.{role}.json"] = old[f"metadata/1.{role}.json"]
    owner.refuses("do not belong together|cannot be used|older")


def test_a_file_for_another_role_does_not_count(owner: Owner) -> None:
    owner.files[TIMESTAMP] = owner.files["metadata/1.targets.json"]
    owner.refuses("cannot be used")


def test_a_refused_look_keeps_what_was_seen_on_the_way(owner: Owner) -> None:
    """The newer timestamp is remembered although the snapshot is missing: going back to the old one is refused."""
    old = owner.files[TIMESTAMP]
    owner.sees("0.2.0")
    owner.place.publish("0.3.0", ARCHIVE)
    del owner.files["metadata/2.snapshot.json"]
    with pytest.raises(DataUnavailableError, match="no metadata"):
        owner.look()
    owner.files[TIMESTAMP] = old
    owner.refuses("older than those seen before")


# Sizes, slowness and nonsense


@pytest.mark.parametrize("name", ["2.root", "timestamp", "1.snapshot", "1.targets"])
def test_endless_metadata_are_cut(owner: Owner, name: str) -> None:
    owner.place.server.behaviours[f"metadata/{name}.json"] = [never_ends]
    owner.refuses("longer than the 262144 bytes")


@pytest.mark.parametrize(("name", "most"), [("2.root", LIMITS.root_max_length), ("timestamp", 8192)])
def test_each_role_has_its_own_limit(owner: Owner, name: str, most: int) -> None:
    owner.place.server.behaviours[f"metadata/{name}.json"] = [serves(b" " * (most + 1))]
    owner.refuses("too long")


def test_endless_rotations_are_cut(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are signed, as a thief of all root keys could do."""
    for _ in range(LIMITS.max_root_rotations + 5):
        owner.publisher.rotate()
    owner.place.put()
    owner.sees("0.2.0")
    asked = [name for name, _ in owner.place.server.requests if "root" in name]
    assert len(asked) == LIMITS.max_root_rotations


def test_a_slow_mirror_holds_nobody_up(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "LOOK_SECONDS", 0.2)
    owner.place.server.behaviours[TIMESTAMP] = [owner.place.server.stalls_after(3)]
    with pytest.raises(DataUnavailableError, match="did not arrive in time"):
        owner.look()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_look_can_be_cancelled(owner: Owner, backend: str) -> None:
    """A node that ends does not wait for a mirror."""
    owner.place.server.behaviours[TIMESTAMP] = [owner.place.server.stalls_after(3)]

    async def main() -> float:
        with anyio.move_on_after(0.3):
            await look_at_metadata(owner.place.url, owner.publisher.anchor, {}, TARGET)
        return anyio.current_time()

    begun = time.monotonic()
    anyio.run(main, backend=backend)
    assert time.monotonic() - begun < 30


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(role=st.sampled_from(["timestamp", "1.snapshot", "1.targets"]), data=st.data())
def test_no_changed_byte_is_believed(owner: Owner, role: str, data: st.DataObject) -> None:
    name = f"metadata/{role}.json"
    content = bytearray(owner.publisher.files[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    owner.files[name] = bytes(content)
    memory_file(owner.settings.data_dir).remove()
    try:
        update = owner.look()
    except NeuroShardError:
        update = None
    finally:
        owner.files[name] = owner.publisher.files[name]
    assert update is None or update.version == "0.2.0"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 8000, b'{"signed": 1, "signatures": []}', b"\xff", b"9" * 8000, b"null"]
)
def test_nonsense_is_refused_in_words(owner: Owner, content: bytes) -> None:
    owner.files[TIMESTAMP] = content
    owner.refuses("cannot be used")


# Kills


def test_a_kill_at_any_write_leaves_all_of_the_old_or_all_of_the_new(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of the data folder fails once, and the look after it finds the newest version. The files of the
    library are in a temporary folder, which no later look reads."""
    owner.sees("0.2.0")
    real = Path.replace
    for broken in range(3):
        owner.place.publish(f"0.{broken + 3}.0", ARCHIVE)
        left = [broken]

        def replace(path: Path, target: Path, left: list[int] = left) -> Path:
            if Path(target).parent == owner.settings.data_dir:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return real(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
                owner.look()
        assert owner.memory().metadata  # readable
        owner.sees(f"0.{broken + 3}.0")
    assert [path.name for path in owner.settings.data_dir.iterdir()] == ["update.json"]


def test_a_mirror_needs_no_trust_to_serve(owner: Owner) -> None:
    """Another server with the same files: what this computer has seen counts there too."""
    owner.place.publish("0.3.0", ARCHIVE)
    owner.sees("0.3.0")
    with HostileServer(dict(owner.files)) as other:
        owner.settings = owner.settings.model_copy(update={"update_url": other.url + "/"})
        owner.sees("0.3.0")
        evil = Publisher()
        evil.release("6.6.6", ARCHIVE)
        other.files.clear()
        other.files.update(evil.files)
        owner.refuses("not signed by enough|cannot be used")
