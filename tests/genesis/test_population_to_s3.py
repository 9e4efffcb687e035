"""The populator as people start it, publishing to an object store: killed and told again, beside another one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worlds.data_sets import contents, made_up_texts, write_json_lines
from tests.worlds.file_servers import BUCKET, LOCATION, StoreServer

PROGRAM = "from neuroshard.cli.main import main; main()"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows knows no SIGKILL"),
]


def start(folder: Path, destination: str, server: StoreServer) -> subprocess.Popen[str]:
    file = folder / "sources.toml"
    file.write_text(
        'tokens_per_shard = 8192\n[[sources]]\nname = "lines"\nkind = "jsonl"\nlocation = "a.jsonl"\n'
        "target_shards = 1000\n[vocabulary]\nmerges = 50\nsample_documents = 100\n"
    )
    command = [sys.executable, "-c", PROGRAM, "genesis", "build", "--config", str(file), "--out", destination]
    command += ["--workers", "1", "--data-dir", str(folder / "data")]
    environment = {
        **os.environ,
        "NEUROSHARD_TOKEN": "11" * 32,
        "SOURCE_DATE_EPOCH": "1700000000",
        "AWS_ENDPOINT_URL": server.url,
    }
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, told = process.communicate(timeout=120)
    return process.returncode, told


def wait_for_shards(server: StoreServer, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while sum("shard_" in name for name in server.names()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_killed_and_told_again_it_publishes_what_a_folder_would_have(server: StoreServer, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", made_up_texts(2_500))
    assert finished(start(tmp_path, str(tmp_path / "g"), server))[0] == 0
    expected = contents(tmp_path / "g")
    assert len(expected) > 25

    first = start(tmp_path, LOCATION, server)
    wait_for_shards(server, 3, first)
    code, told = finished(start(tmp_path, LOCATION, server))
    assert code == 5
    assert f"(process {first.pid} on " in told
    first.kill()
    first.communicate()
    second = start(tmp_path, LOCATION, server)
    wait_for_shards(server, 8, second)
    second.kill()
    second.communicate()
    code, told = finished(start(tmp_path, LOCATION, server))
    assert code == 0, told

    published = tmp_path / "published"
    for key in server.names():
        file = published / key.removeprefix("data/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    assert contents(published) == expected
    assert server.unfinished_uploads() == []
    check = [sys.executable, "-c", PROGRAM, "genesis", "verify", LOCATION, "--s3-endpoint", server.url]
    told = subprocess.run(check, capture_output=True, text=True, check=True).stdout
    shards = sum("shard_" in name for name in expected)
    assert f"{shards} of {shards} shards checked; the manifest is signed by" in told
