"""A data set in an object store: what is written is read, conditions hold, trouble is told. Against a real server."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuroshard.cli.main import app
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.dataset import s3_objects as connection_module
from neuroshard.dataset.destination import Condition, S3Destination, Version, open_destination
from neuroshard.dataset.s3_objects import split_location
from neuroshard.errors import ConflictError, DataError, DataUnavailableError, StorageError, UsageError
from tests.worlds.data_sets import (
    TestSigner,
    folder_files,
    refuses_a_large_object_before_it_is_read,
    write_genesis,
    writes_only_under_its_condition,
)
from tests.worlds.file_servers import BUCKET, LOCATION, PART, StoreServer, front_of

LARGE = bytes(range(256)) * (3 * PART // 256) + b"end"


@pytest.fixture
def destination(server: StoreServer) -> Iterator[S3Destination]:
    opened = S3Destination(LOCATION, endpoint=server.url, part_bytes=PART)
    yield opened
    opened.close()


def test_what_was_written_is_read(destination: S3Destination, server: StoreServer) -> None:
    with destination.claim("a build"):
        assert destination.read("manifest.json", 100) is None
        version = destination.write("pages/00000.bin", b"page")
        destination.write("manifest.json", b"{}")
        there = destination.read("pages/00000.bin", 4)
        assert there is not None
        assert (there.content, there.version) == (b"page", version)
        assert list(destination.names()) == ["manifest.json", "pages/00000.bin"]
        assert list(destination.names("pages/")) == ["pages/00000.bin"]
    assert server.names() == ["data/manifest.json", "data/pages/00000.bin"]  # and no claim


def test_objects_say_what_caches_may_do_and_carry_their_checksum(
    destination: S3Destination, server: StoreServer
) -> None:
    with destination.claim("a build"):
        destination.write("shard_0.bin", b"tokens")
        destination.write("manifest.json", b"{}")
    shard = server.client.head_object(Bucket=BUCKET, Key="data/shard_0.bin", ChecksumMode="ENABLED")
    manifest = server.client.head_object(Bucket=BUCKET, Key="data/manifest.json")
    assert "immutable" in shard["CacheControl"]
    assert shard["ChecksumSHA256"] == b64encode(sha256(b"tokens").digest()).decode()
    assert (manifest["CacheControl"], manifest["ContentType"]) == ("no-cache", "application/json")


def test_a_large_object_goes_up_in_parts(destination: S3Destination, server: StoreServer) -> None:
    with destination.claim("a build"):
        destination.write("shard_0.bin", LARGE, expected=Condition.ABSENT)
        there = destination.read("shard_0.bin", len(LARGE))
        assert there is not None
        assert sha256(there.content).digest() == sha256(LARGE).digest()
        assert there.version.strip('"').endswith("-4")  # four parts
        with pytest.raises(ConflictError):
            destination.write("shard_0.bin", LARGE[::-1], expected=Condition.ABSENT)
        with pytest.raises(ConflictError):
            destination.write("shard_0.bin", LARGE[::-1], expected=Version('"other"'))
        destination.write("shard_0.bin", LARGE[::-1], expected=there.version)
    assert server.unfinished_uploads() == []
    head = server.client.head_object(Bucket=BUCKET, Key="data/shard_0.bin")
    assert "immutable" in head["CacheControl"]


def test_a_large_object_is_refused_before_it_is_read(destination: S3Destination) -> None:
    refuses_a_large_object_before_it_is_read(destination)


def test_a_write_with_a_condition_happens_only_under_it(destination: S3Destination) -> None:
    with destination.claim("a build"):
        writes_only_under_its_condition(destination, Version('"another"'))


def test_more_than_a_thousand_names_are_listed(destination: S3Destination, server: StoreServer) -> None:
    server.put_empty(1005)
    assert len(list(destination.names("shard_"))) == 1005


def test_a_store_that_is_busy_is_asked_again(server: StoreServer) -> None:
    with front_of(server) as front:
        destination = S3Destination(LOCATION, endpoint=front.url, part_bytes=PART)
        with destination.claim("a build"):
            front.plan = [503, 500]
            destination.write("shard_0.bin", b"tokens", expected=Condition.ABSENT)
            assert front.plan == []
        destination.close()
    assert server.names() == ["data/shard_0.bin"]


def test_an_answer_that_was_lost_is_no_conflict(server: StoreServer) -> None:
    """The request had succeeded: its repetition is refused, and that is not somebody else's work."""
    with front_of(server) as front:
        destination = S3Destination(LOCATION, endpoint=front.url, part_bytes=PART)
        with destination.claim("a build"):
            front.plan = ["lose"]
            version = destination.write("checkpoints.json", b"1", expected=Condition.ABSENT)
            front.plan = ["lose"]
            destination.write("checkpoints.json", b"2", expected=version)
            there = destination.read("checkpoints.json", 10)
            assert there is not None
            assert there.content == b"2"
        destination.close()


def test_a_store_that_stays_busy_is_told_and_leaves_no_parts(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_ATTEMPTS", 2)
    with front_of(server) as front:
        destination = S3Destination(LOCATION, endpoint=front.url, part_bytes=PART)
        with destination.claim("a build"):
            front.plan = ["pass", "pass", 503, 503]  # begun, one part, then no more
            with pytest.raises(DataUnavailableError, match="is overloaded"):
                destination.write("shard_0.bin", LARGE)
        destination.close()
    assert server.unfinished_uploads() == []
    assert server.names() == []


def test_an_answer_that_broke_off_is_asked_for_again(server: StoreServer) -> None:
    server.client.put_object(Bucket=BUCKET, Key="data/shard_0.bin", Body=LARGE)
    with front_of(server) as front:
        destination = S3Destination(LOCATION, endpoint=front.url)
        front.answers_to_cut = 2
        there = destination.read("shard_0.bin", len(LARGE))
        assert there is not None
        assert there.content == LARGE
        front.answers_to_cut = 3
        with pytest.raises(DataUnavailableError, match="The transfer of"):
            destination.read("shard_0.bin", len(LARGE))
        destination.close()


def test_an_answer_that_was_spoilt_on_the_way_is_asked_for_again(server: StoreServer) -> None:
    """By its checksum, whatever it is and whoever reads it."""
    with front_of(server) as front:
        destination = S3Destination(LOCATION, endpoint=front.url)
        destination.write("checkpoints.json", b"state")
        front.answers_to_spoil = 2
        there = destination.read("checkpoints.json", 10)
        assert there is not None
        assert (there.content, front.answers_to_spoil) == (b"state", 0)
        destination.close()


def test_a_wrong_bucket_is_told(server: StoreServer) -> None:
    destination = S3Destination("s3://elsewhere/data", endpoint=server.url)
    with pytest.raises(StorageError, match="There is no bucket elsewhere"), destination.claim("a build"):
        pass
    with pytest.raises(StorageError, match="There is no bucket elsewhere"):
        destination.read("manifest.json", 10)
    with pytest.raises(StorageError, match="There is no bucket elsewhere"):
        list(destination.names())
    destination.close()


def test_missing_credentials_are_told(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    destination = S3Destination(LOCATION, endpoint=server.url)
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        destination.read("manifest.json", 10)
    destination.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half")
    with pytest.raises(UsageError, match="AWS_"):
        S3Destination(LOCATION, endpoint=server.url).read("manifest.json", 10)


def test_a_missing_permission_is_told(destination: S3Destination, server: StoreServer) -> None:
    server.set_policy("Deny", "s3:PutObject")
    with pytest.raises(StorageError, match=r"permission denied.*s3:PutObject"), destination.claim("a build"):
        pass


def test_a_store_that_is_not_there_is_told(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_ATTEMPTS", 1)
    with front_of(server) as front:
        url = front.url
    with pytest.raises(DataUnavailableError, match="cannot be reached"):
        S3Destination(LOCATION, endpoint=url).read("manifest.json", 10)


def test_secrets_are_never_logged(
    destination: S3Destination, caplog: pytest.LogCaptureFixture, server: StoreServer
) -> None:
    caplog.set_level(logging.DEBUG)
    destination.write("manifest.json", b"{}")
    with pytest.raises(StorageError) as told:
        S3Destination("s3://elsewhere", endpoint=server.url).read("a.json", 1)
    assert "secret-of-nobody" not in caplog.text + str(told.value)


@pytest.mark.parametrize(
    "location",
    ["s3://", "s3:///x", "s3://A_B/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?y=1", "s3://b"],
)
def test_locations_that_cannot_be_are_refused(location: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        open_destination(location)


def test_locations_are_split() -> None:
    assert split_location("s3://bucket") == ("bucket", "")
    assert split_location("s3://bucket/a/b/") == ("bucket", "a/b/")


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(UsageError, match=r"neuroshard\[s3\]"):
        open_destination("s3://bucket/x")


def test_a_data_set_in_a_store_is_verified_and_described(server: StoreServer, tmp_path: Path) -> None:
    table = TokenizerTable(((10, 11), (12, 13)), vocab_size=300)
    write_genesis(
        tmp_path,
        shards=3,
        signer=TestSigner(),
        tokenizer=table.to_json(),
        next_merge_id=table.next_merge_id,
    )
    destination = open_destination(LOCATION, s3_endpoint=server.url)
    with destination.claim("a copy"):
        for name, content in folder_files(tmp_path).items():
            destination.write(name, content)
    destination.close()
    arguments = [LOCATION, "--s3-endpoint", server.url]
    # The samples have ids beyond this small table: the check reads them.
    found = CliRunner().invoke(app, ["genesis", "verify", *arguments])
    assert "3 of 3 shards checked" in found.output
    assert "- shard_0.bin has token ids outside 0.." in found.output
    server.client.delete_object(Bucket=BUCKET, Key="data/shard_1.bin")
    assert "- shard_1.bin is missing." in CliRunner().invoke(app, ["genesis", "verify", *arguments]).output
    assert "3 shards, 1,200 tokens" in CliRunner().invoke(app, ["genesis", "status", *arguments]).output
    empty = CliRunner().invoke(app, ["genesis", "status", "s3://genesis/nothing", "--s3-endpoint", server.url])
    assert isinstance(empty.exception, DataError)
