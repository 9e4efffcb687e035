"""Commands of rank 0 to the other ranks of a site, and their answers. One declaration per message.

Every command reaches every rank, with its number in the order of all commands. After most of them a rank answers with
its `Done`, so that rank 0 notices a rank that has ended or hangs.

| command | follows from rank 0 | answer |
| --- | --- | --- |
| `BuildStage`, `MoveTensors`, `ForgetStages` | - | `Done` |
| `TakeWeights` | the tensors, to all ranks | `Done` |
| `ReadRows` | - | this rank's rows of each tensor, without `Done` |
| `WriteRows` | a rank's rows of each tensor, to this rank | `Done` |
| `RunPass` | a rank's inputs, labels or gradient, to this rank | `Done` with the tensors of the result |
| `AddGradients` | which gradients exist, then all ranks add them, then `ApplyGradients` | `Done`, before the sum |

In mode `shard`, all ranks run each `RunPass`, those without a microbatch for nothing. The passes add the gradients, and
`AddGradients` only adds their squares. Only this mode has rows to read and write.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from neuroshard.decoders import msgpack_decoder


class PassKind(StrEnum):
    """Pass of a microbatch."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Movement(StrEnum):
    """Movement of a stage's tensors, or their release."""

    SUSPEND = "suspend"
    RESUME = "resume"
    DROP = "drop"
    ALLOCATE = "allocate"
    ZERO = "zero"  # of the gradients
    ASIDE = "aside"  # keep the weights while others are used
    BACK = "back"


class TensorForm(Struct, frozen=True):
    """Type and shape of a tensor that follows."""

    dtype: str
    shape: tuple[int, ...]


class BuildStage(Struct, frozen=True, tag="build"):
    """Build a stage without values."""

    stage: int
    parameters: bytes  # of the run, as JSON
    layers: tuple[int, int]
    compile: str
    is_sharded: bool = False


class TakeWeights(Struct, frozen=True, tag="weights"):
    """Take over rank 0's weights, and its moments if they have changed too."""

    stage: int
    with_moments: bool


class ReadRows(Struct, frozen=True, tag="read"):
    """Send this rank's rows of some tensors of a stage that is divided among the ranks."""

    stage: int
    names: tuple[str, ...]


class WriteRows(Struct, frozen=True, tag="write"):
    """Take over this rank's rows of some tensors."""

    stage: int
    names: tuple[str, ...]


class RunPass(Struct, frozen=True, tag="pass"):
    """Run one pass: of a microbatch on each rank whose number is not 0."""

    stage: int
    operation: PassKind
    precision: str
    keeps_graph: bool
    microbatches: tuple[int, ...]  # numbers by rank; a number names one microbatch between its two passes
    tensors: tuple[TensorForm | None, ...]  # inputs, labels and ids, or the gradient, of each microbatch
    forgotten: tuple[int, ...]  # microbatches that have no backward pass


class AddGradients(Struct, frozen=True, tag="gradients"):
    """Add the gradients of all ranks. Each rank then steps with them, or clears them."""

    stage: int


class MoveTensors(Struct, frozen=True, tag="place"):
    """Move, free or clear the tensors of a stage."""

    stage: int
    movement: Movement


class ForgetStages(Struct, frozen=True, tag="forget"):
    """Free stages that the node no longer has."""

    stages: tuple[int, ...]


class EndSite(Struct, frozen=True, tag="end"):
    """End cleanly. Ranks that rank 0 has started itself end without this command."""


class ApplyGradients(Struct, frozen=True, tag="apply"):
    """Values that every rank uses in its optimizer step, measured by rank 0."""

    is_step: bool  # False: the gradients are cleared without a step
    learning_rate: float = 0.0
    max_norm: float = 1.0
    tokens: int = 1
    grad_norm: float = 0.0  # of the mean gradient, before clipping


Command = (
    BuildStage | TakeWeights | ReadRows | WriteRows | RunPass | AddGradients | MoveTensors | ForgetStages | EndSite
)


class Done(Struct, frozen=True):
    """Answer of a rank."""

    number: int  # of the command
    values: tuple[float, ...] = ()  # seconds, 1 if spoilt, summed loss or NaN
    present: bytes = b""  # one byte for each parameter: 1 if it has a gradient
    tensors: tuple[TensorForm | None, ...] = ()  # of the result, which follow


class RankFacts(Struct, frozen=True):
    """Properties that must be the same on all ranks of a site."""

    neuroshard: str
    torch: str
    width: Annotated[int, Meta(ge=1)]
    device: str  # its kind

    def difference(self, other: RankFacts) -> str:
        """The first property that another rank has with another value, with both values; "" if none differs."""
        words = {"neuroshard": "NeuroShard", "torch": "PyTorch", "width": "WORLD_SIZE", "device": "device"}
        for name in self.__struct_fields__:
            own, found = getattr(self, name), getattr(other, name)
            if own != found:
                return f"{words[name]} {found} instead of {own}"
        return ""


def to_message(message: Struct) -> bytes:
    """Encode a message."""
    return msgpack.encode(message)


def decode_command(data: bytes) -> Command:
    """Decode a command of rank 0."""
    return msgpack_decoder(Command).decode(data)


def decode_apply(data: bytes) -> ApplyGradients:
    """Decode the values of an optimizer step."""
    return msgpack_decoder(ApplyGradients).decode(data)
