"""Codecs by the name that a run's parameters give them."""

from __future__ import annotations

from typing import assert_never

from neuroshard.compression.bf16 import Bf16Codec
from neuroshard.compression.codec import Codec
from neuroshard.compression.fp32 import Fp32Codec
from neuroshard.compression.int4 import Int4Codec
from neuroshard.compression.int8 import Int8Codec
from neuroshard.config.run_parameters import CodecName


def make_codec(name: CodecName) -> Codec:
    """The codec a run's parameters name."""
    match name:
        case "fp32":
            return Fp32Codec()
        case "bf16":
            return Bf16Codec()
        case "int8":
            return Int8Codec()
        case "int4":
            return Int4Codec()
        case _:
            assert_never(name)
