"""Writes what the lossy codecs make of one vector; the kernels are chosen by the environment, threads by argument."""

from __future__ import annotations

import sys
from hashlib import sha256

import torch

from neuroshard.compression import make_codec


def made_vector(length: int) -> torch.Tensor:
    """Numbers of every size that fp32 has, from whole numbers, so that no generator's version matters."""
    index = torch.arange(length, dtype=torch.int64)
    bits = (index * 2654435761 + 12345) % 2**32
    finite = torch.where(bits & 0x7F800000 == 0x7F800000, bits & 0x7FFFFF, bits)
    wild = torch.where(finite >= 2**31, finite - 2**32, finite).to(torch.int32).view(torch.float32)
    tame = (bits % 2003 - 1001).to(torch.float32) / 1000
    return torch.where(index // 5000 % 2 == 0, tame, wild)


def digests() -> list[str]:
    """Of bytes and of decoded numbers, for int8, bf16 and int4."""
    vector = made_vector(600_000)
    found: list[str] = []
    for name in ("int8", "bf16", "int4"):
        codec = make_codec(name)
        data = codec.encode(vector)
        found += [sha256(data).hexdigest(), sha256(codec.decode(data, len(vector)).numpy().tobytes()).hexdigest()]
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    torch.set_flush_denormal(sys.argv[2] == "flush")
    sys.stdout.write(" ".join([torch.backends.cpu.get_cpu_capability(), *digests()]))
