"""From a shard's bytes to tokens that are trained on: the work of a node, and what its trainer waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median

import anyio
import numpy as np

from benchmarks.huge_source import SHARDS, HugeSource, know_ten_shards
from benchmarks.record import Report, Row
from benchmarks.shaped_line import FAR_ADDRESS, Line, NoLineError, shaped_line
from benchmarks.shard_reader import VOCABULARY
from benchmarks.sizes import size
from neuroshard.data.data_set import open_genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_file import ShardForm
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.data.source import open_source
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.types import ShardId

SHARD_TOKENS = size(2_500_000, 600_000)  # more than a block
SHARD_COUNT = size(16, 4)
REPEATS = size(5, 1)
LINE_MBIT, RTT_MS = 50, 50
PORT = 8100
READ_SECONDS = size(60.0, 0.5)
WHOLE_WAY = (
    "The goal is for the whole way: beside the digest, the file is read, checked and written. What follows "
    "the last block is told because on a line that is slower than the disk it is all that a node waits for."
)
PACE = (
    "The trainer on the line is a clock that takes batches at that pace, one run each. Fetching and checking are real "
    "work. The goal is for the time after the first batch: before it, the first shard takes 0.8 s of the line itself."
)
BLOCK_BYTES = 1 << 20
# tokens a second: a shard every 25 and every 6 seconds, and the line brings one in 0.8
RATES = size((100_000, 400_000), (400_000,))


def measure() -> Report:
    """Builds 16 shards of 5 MB in a temporary folder."""
    rows, notes = list[Row](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        genesis = _genesis(folder / "genesis")
        rows += _ready_rows(folder, genesis)
        try:
            with shaped_line(LINE_MBIT, RTT_MS, 0.0) as line:
                rows += [_waiting_row(line, folder / str(rate), genesis, rate) for rate in RATES]
        except NoLineError as error:
            notes.append(f"The shaped line was not measured: {error}.")
    rows.append(_metadata_row())
    notes += [WHOLE_WAY, PACE]
    return Report("shards", "Shards on their way to training", tuple(rows), tuple(notes))


def _genesis(folder: Path) -> Path:
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=SHARD_TOKENS)
    random = np.random.default_rng(1)
    for _ in range(SHARD_COUNT):
        writer.add_shard(random.integers(10, VOCABULARY, SHARD_TOKENS))
    writer.finish(None, tokenizer=b"{}", next_merge_id=VOCABULARY, now="")
    return folder


def _ready_rows(folder: Path, genesis: Path) -> list[Row]:
    data = (genesis / "shard_0.bin").read_bytes()
    digest = median(_seconds(lambda: sha256(data).digest()) for _ in range(REPEATS))
    cache = ShardCache(folder / "cache", limit_bytes=10**9)
    after = median(_finish_seconds(cache, data) for _ in range(REPEATS)) / digest
    rows = [Row("shard ready after its last block of 1 MiB, in SHA-256 over it", f"{after:.2f}", "report", None)]
    with _served(genesis, "127.0.0.1", []) as url:
        for place, location in (("folder", str(genesis)), ("loopback HTTP", url)):
            whole = anyio.run(partial(_fetch_seconds, location, folder / place), backend="trio") / digest
            rows.append(Row(f"shard ready from its first byte on, {place}", f"{whole:.2f}", "<= 1.5", whole <= 1.5))
    return [*rows, Row("one SHA-256 over a shard of 5 MB", f"{digest * 1e3:.1f} ms", "report", None)]


def _finish_seconds(cache: ShardCache, data: bytes) -> float:
    """What is left to do when all but the last block was hashed and written."""
    form = ShardForm("shard_0.bin", "bin", SHARD_TOKENS, VOCABULARY, SHARD_TOKENS, has_digest=True)
    with cache.writer(ShardId(0), bytes(32)) as writer:
        writer.write(data[:-BLOCK_BYTES])
        began = time.perf_counter()
        sha256(data[-BLOCK_BYTES:]).digest()
        writer.write(data[-BLOCK_BYTES:])
        cache.take(ShardId(0), bytes(32), form, writer)
        return time.perf_counter() - began


@contextmanager
def _served(genesis: Path, host: str, before: list[str]) -> Generator[str]:
    """The URL of `genesis serve` in a process of its own; `before` is put before the command."""
    serve = [sys.executable, "-m", "neuroshard", "genesis", "serve", str(genesis), "--host", host, "--port", str(PORT)]
    server = subprocess.Popen([*before, *serve], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()  # it says where it serves
        yield f"http://{host}:{PORT}"
    finally:
        server.terminate()
        server.wait()


async def _fetch_seconds(location: str, home: Path) -> float:
    source = open_source(location)
    genesis = await open_genesis(Fetcher(source), home / "descriptions")
    await genesis.shard_digest(ShardId(0))
    loader = ShardLoader(genesis, ShardCache(home, limit_bytes=10**9), vocabulary_size=VOCABULARY)
    taken: list[float] = []
    for shard in range(REPEATS):
        began = time.perf_counter()
        await loader.load(ShardId(shard), keep=())
        taken.append(time.perf_counter() - began)
    await source.aclose()
    return median(taken)


def _waiting_row(line: Line, home: Path, genesis: Path, rate: int) -> Row:
    """A trainer on one end of the line, `genesis serve` on the other."""
    with _served(genesis, FAR_ADDRESS, line.inside(line.far)) as url:
        reader = [sys.executable, "-m", "benchmarks.shard_reader", url, str(home), str(rate), str(READ_SECONDS)]
        done = subprocess.run([*line.inside(line.near), *reader], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    share, first = seen["waited_share"], seen["first_seconds"]
    whole = (share * seen["seconds"] + first) / (seen["seconds"] + first)
    read = f"{READ_SECONDS:g} s, {seen['shards']} shards"
    figure = f"{share:.2%} of {read}; {whole:.1%} with the wait for the first batch, {first:.1f} s"
    item = f"trainer waits for data, {rate:,} tokens/s on {LINE_MBIT} Mbit/s, {RTT_MS} ms"
    return Row(item, figure, "< 1 %", share < 0.01)


def _metadata_row() -> Row:
    """What one node fetches and keeps to know its first shards among very many."""
    source = HugeSource()
    with tempfile.TemporaryDirectory() as folder:
        if not anyio.run(know_ten_shards, source, Path(folder)):
            raise AssertionError("a digest is not the one of its shard")
        kept = sum(path.stat().st_size for path in Path(folder).iterdir())
    most = max(source.bytes_sent, kept)
    figure = f"{source.bytes_sent / 1e6:.2f} MB fetched, {kept / 1e6:.2f} MB kept"
    return Row(f"metadata of a simulated manifest of {SHARDS:,} shards, one node", figure, "< 0.5 MB", most < 500_000)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
