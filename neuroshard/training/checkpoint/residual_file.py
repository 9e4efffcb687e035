"""The file of a residual beside a generation's tensors: local state, so it is no part of the file that others fetch.

The SHA-256 of the tensor file and of the numbers, then the numbers: a residual belongs to one generation. One that is
damaged or lost costs the rounding of one contribution, and so is no reason to give the generation up.
"""

from __future__ import annotations

import logging
import os
import secrets
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from neuroshard.config.atomic_write import TEMPORARY_PREFIX
from neuroshard.training.checkpoint.tensor_file import bytes_of

SUFFIX = ".residual"
_LABEL = b"neuroshard/residual"
_DIGEST_BYTES = 32
_LOG = logging.getLogger(__name__)


def residual_path(tensors: Path) -> Path:
    """Where the residual of the generation with this tensor file lies."""
    return tensors.with_suffix(SUFFIX)


def write_residual(residual: Tensor, tensors: Path, tensors_sha256: str) -> None:
    """Write a residual (d,), whole or not at all, beside its generation's tensors. Raises OSError."""
    temporary = tensors.with_name(f"{TEMPORARY_PREFIX}{tensors.stem}{SUFFIX}-{secrets.token_hex(4)}")
    with temporary.open("xb") as file:
        file.write(_digest(residual, tensors_sha256))
        file.write(bytes_of(residual))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(residual_path(tensors))


def read_residual(tensors: Path, tensors_sha256: str) -> Tensor | None:
    """The residual (d,) of a generation; None, with a warning, for one that is damaged or another's."""
    path = residual_path(tensors)
    try:
        if not path.exists():
            return None
        length, rest = divmod(path.stat().st_size - _DIGEST_BYTES, 4)
        if rest == 0 and 0 < 4 * length < tensors.stat().st_size:
            residual = torch.empty(length)
            with path.open("rb") as file:
                digest, read = file.read(_DIGEST_BYTES), file.readinto(bytes_of(residual))
            if read == residual.nbytes and digest == _digest(residual, tensors_sha256):
                return residual
        trouble = "it is not the one that was written with the checkpoint"
    except OSError as error:
        trouble = error.strerror or str(error)
    _LOG.warning("%s is not used: %s. The next round begins without it.", path, trouble)
    return None


def _digest(residual: Tensor, tensors_sha256: str) -> bytes:
    digest = sha256(_LABEL + bytes.fromhex(tensors_sha256))
    digest.update(bytes_of(residual))
    return digest.digest()
