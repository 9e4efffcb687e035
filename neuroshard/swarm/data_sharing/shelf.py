"""What of a data set lies here and can be given to others, found by name and contents. Blocks on the disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from neuroshard.data.cache import ShardCache
from neuroshard.data.descriptions import manifest_copy, page_copy, tokenizer_copy
from neuroshard.data.genesis.layout import MANIFEST_NAME, TOKENIZER_NAME
from neuroshard.data.packed import PackedFile, whole_file
from neuroshard.types import ShardId

_SHARD = re.compile(r"shard_([0-9]{1,9})\.pt", re.ASCII)
_PAGE = re.compile(r"pages/[0-9]{5}\.bin", re.ASCII)
_TABLE = re.compile(rf"{re.escape(TOKENIZER_NAME)}|tokenizers/[0-9a-f]{{64}}\.json", re.ASCII)


@dataclass
class DataShelf:
    """`store` is where the descriptions of data sets are kept; `cache` where the shards are, once there is one."""

    store: Path
    cache: ShardCache | None = None

    def find(self, name: str, address: str) -> PackedFile | None:
        """The file of this name with exactly these contents; None when it is not here."""
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            return None if self.cache is None else self.cache.packed(ShardId(int(shard[1])), bytes.fromhex(address))
        copy = _copy_of(name, address)
        if copy is None:
            return None
        try:
            return whole_file(self.store / copy)
        except OSError:
            return None


def _copy_of(name: str, address: str) -> str | None:
    if name == MANIFEST_NAME:
        return manifest_copy(address)
    if _PAGE.fullmatch(name):
        return page_copy(address)
    return tokenizer_copy(address) if _TABLE.fullmatch(name) else None
