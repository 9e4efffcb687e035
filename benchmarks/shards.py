"""From a shard's bytes to tokens that are trained on: the work of a node, and what its trainer waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
from neuroshard.data.cache import ShardCache
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.genesis.torch_file import inspect_shard
from neuroshard.data.genesis.writer import GenesisWriter
from neuroshard.data.loading import ShardLoader
from neuroshard.data.opening import open_genesis
from neuroshard.data.source import open_source
from neuroshard.genesis import GenesisServer
from neuroshard.genesis.destination import FolderDestination
from neuroshard.types import ShardId

SHARD_TOKENS = 2_500_000
SHARD_COUNT = 16
REPEATS = 5
LINE_MBIT, RTT_MS = 50, 50
PORT = 8100
READ_SECONDS = 60.0
WHOLE_WAY = (
    "The goal is for the whole way: beside the digest, the file is read, written and unpacked. What follows the last "
    "byte is told because on a line that is slower than the disk it is all that a node waits for."
)
PACE = (
    "The trainer on the line is a clock that takes batches at that pace, one run each. Fetching and unpacking are real "
    "work. The wait for the first batch is not in the share."
)
RATES = (100_000, 400_000)  # tokens a second; a shard every 25 and every 6 seconds, the line brings one in 3.2


def measure() -> Report:
    """Builds 16 shards of 20 MB in a temporary folder."""
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
    file = genesis / "shard_0.pt"
    data = file.read_bytes()
    digest = median(_seconds(lambda: sha256(data).digest()) for _ in range(REPEATS))
    cache = ShardCache(folder / "unpacked", limit_bytes=10**9)

    def unpack() -> None:
        cache.store(ShardId(0), bytes(32), inspect_shard(file, max_tokens=SHARD_TOKENS), VOCABULARY)

    after = median(_seconds(unpack) for _ in range(REPEATS)) / digest
    rows = [Row("shard ready after its last byte, in SHA-256 over it", f"{after:.2f}", "report", None)]
    with GenesisServer(genesis) as server:
        for place, location in (("folder", str(genesis)), ("loopback HTTP", server.url)):
            whole = anyio.run(partial(_fetch_seconds, location, folder / place), backend="trio") / digest
            rows.append(Row(f"shard ready from its first byte on, {place}", f"{whole:.2f}", "<= 1.5", whole <= 1.5))
    return [*rows, Row("one SHA-256 over a shard of 20 MB", f"{digest * 1e3:.1f} ms", "report", None)]


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
    serve = [sys.executable, "-m", "neuroshard", "genesis", "serve", str(genesis), "--host", FAR_ADDRESS]
    server = subprocess.Popen([*line.inside(line.far), *serve, "--port", str(PORT)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()  # it says where it serves
        place = f"http://{FAR_ADDRESS}:{PORT}"
        reader = [sys.executable, "-m", "benchmarks.shard_reader", place, str(home), str(rate), str(READ_SECONDS)]
        done = subprocess.run([*line.inside(line.near), *reader], capture_output=True, text=True, check=True)
    finally:
        server.terminate()
        server.wait()
    seen = json.loads(done.stdout)
    share = seen["waited_share"]
    read = f"{READ_SECONDS:g} s, {seen['shards']} shards"
    figure = f"{share:.2%} of {read}; the first batch after {seen['first_seconds']:.1f} s"
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
