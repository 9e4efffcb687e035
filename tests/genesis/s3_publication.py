"""A populator for tests of kills: publishes shard after shard to a destination until it is ended or done."""

from __future__ import annotations

import signal
import sys

from neuroshard.dataset.destination import Destination, open_destination
from neuroshard.dataset.object_store import Condition
from neuroshard.dataset.writer import GenesisWriter
from tests.data.genesis_samples import TOKENIZER, TestSigner, shard_tokens

SHARD_TOKENS = 700_000  # two parts of a multipart upload


def publish(destination: Destination, shards: int) -> None:
    """Write shards and their state one by one, each published before the next begins."""
    writer = GenesisWriter(destination, tokens_per_shard=SHARD_TOKENS)
    state = destination.read("checkpoints.json", 100)
    version = Condition.ABSENT if state is None else state.version
    for shard in range(writer.shard_count, shards):
        writer.add_shard(shard_tokens(shard, SHARD_TOKENS))
        writer.finish(TestSigner(), tokenizer=TOKENIZER, next_merge_id=1000, now="2026-01-01T00:00:00Z")
        version = destination.write("checkpoints.json", b"%d" % shard, expected=version)
        sys.stdout.write(f"{shard}\n")
        sys.stdout.flush()


def main(location: str, endpoint: str, shards: int) -> None:
    """One populator with its claim."""
    destination = open_destination(location, s3_endpoint=endpoint or None)
    with destination.claim("test populator"):
        publish(destination, shards)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
