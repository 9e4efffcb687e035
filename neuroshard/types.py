"""Identifiers and small frozen values that every room shares; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any, Literal, NewType, TypeAlias, get_type_hints

from msgspec import Meta, Struct
from pydantic import Field

NodeId = NewType("NodeId", str)  # libp2p peer id of the node's Ed25519 key
WALLET_ID_DIGITS = 32
WalletId = NewType("WalletId", str)  # first WALLET_ID_DIGITS hex digits of SHA-256(wallet public key)
RunId = NewType("RunId", str)  # 64 hex digits
ShardId = NewType("ShardId", int)

PRINTABLE = r"\A[ -~]*\Z"  # a pattern: printable ASCII
LOOPBACK = "127.0.0.1"
DAY_SECONDS = 86_400.0
BITS_PER_BYTE = 8
MAX_NODE_ID_CHARACTERS = 64  # the id of an Ed25519 key has 52
MAX_ADDRESS_CHARACTERS = 256  # of a multiaddr, or of a host and its port
LATEST_TIME = 10**11  # seconds since 1970
UnixSeconds = Annotated[float, Meta(ge=0, le=LATEST_TIME)]  # a time in a message: seconds since 1970
NamedRun = Annotated[RunId, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # the run id in a message
NamedWallet = Annotated[WalletId, Meta(max_length=WALLET_ID_DIGITS, pattern=PRINTABLE)]  # the wallet id in a message
HexDigest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # a SHA-256 or BLAKE3 in a message
LARGEST_REAL = 1e300
ID_BYTES = 4  # of a token id in a message
MOST_COMPLETION_TOKENS = 2_048  # of one continuation or reply
PositiveReal = Annotated[float, Meta(gt=0, le=LARGEST_REAL)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**63 - 1)]
HexKey = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # an Ed25519 key in a file
HexSignature = Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]  # an Ed25519 signature in a file

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


class Role(StrEnum):
    """A node's work in the pipeline; it follows from the layers it holds."""

    DRIVER = "driver"  # first layer: loads data, embeds, starts the forward pass
    WORKER = "worker"  # middle layers
    VALIDATOR = "validator"  # last layer: loss, starts the backward pass


@dataclass(frozen=True)
class Architecture:
    """Shape of one Llama-like model; equal values mean interchangeable weights."""

    hidden_size: PositiveCount
    layer_count: PositiveCount
    head_count: PositiveCount
    key_value_head_count: PositiveCount
    feed_forward_size: PositiveCount
    vocabulary_size: PositiveCount
    sequence_length: PositiveCount
    rope_theta: PositiveReal = 10_000.0
    norm_epsilon: PositiveReal = 1e-5
    # RMS norm of queries and keys before RoPE: over each "head", or over the "width" of all heads together
    qk_norm: Literal["none", "head", "width"] = field(default="none", metadata={"since": 7})
    # True: x + norm(attention(x)), as in OLMo 2; False: x + attention(norm(x))
    norm_reorder: bool = field(default=False, metadata={"since": 7})
    # False: the norms of blocks, queries and keys have no scale; the final norm always has one
    trainable_rmsnorm: bool = field(default=True, metadata={"since": 7})
    initialisation: Literal["fan_in", "depth"] = field(default="fan_in", metadata={"since": 7})
    # Numbers per token that travel between stages: the residual stream before the last `free_blocks` layers stays in a
    # subspace of this dimension, apart from a frozen row of the token. 0: the whole width travels.
    subspace_rank: Annotated[int, Meta(ge=0, le=2**63 - 1)] = field(default=0, metadata={"since": 7})
    free_blocks: Annotated[int, Meta(ge=0, le=2**63 - 1)] = field(default=0, metadata={"since": 7})

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.head_count

    @property
    def wire_size(self) -> int:
        """Numbers per token that travel between stages: the coefficients of the subspace, or the whole width."""
        return self.subspace_rank or self.hidden_size

    @property
    def constrained_layers(self) -> int:
        """Number of layers, from the first one, that write into the subspace only."""
        return max(0, self.layer_count - self.free_blocks) if self.subspace_rank else 0


MAX_LAYERS = 4096
MAX_SHARDS = 10**8
MAX_LOSS = 10_000.0  # nats per token; a peer that sends a higher loss is wrong


class _Range(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Numbers start, start + 1, ... stop - 1: `[start, stop]` in messages, an object in the API and in checkpoints."""

    @classmethod
    def __get_pydantic_core_schema__(cls: Any, _source: object, handler: Callable[[type], Any]) -> Any:
        """Let pydantic, which does not know structs, read and write a range as a dataclass of the same name."""
        from pydantic_core import core_schema

        fields = get_type_hints(cls, include_extras=True).items()
        as_object = make_dataclass(cls.__name__, fields, namespace={"__doc__": cls.__doc__})

        def to_object(value: Any) -> Any:
            return as_object(value.start, value.stop) if isinstance(value, cls) else value

        def to_range(value: Any) -> Any:
            return cls(value.start, value.stop)

        schema = handler(as_object)
        return core_schema.no_info_after_validator_function(
            to_range,
            core_schema.no_info_before_validator_function(to_object, schema),
            serialization=core_schema.plain_serializer_function_ser_schema(to_object, return_schema=schema),
        )


class LayerRange(_Range, frozen=True, order=True):
    """Layers start, start + 1, ... stop - 1 of a model."""

    # The bounds apply to ranges that peers send.
    start: Annotated[int, Meta(ge=0, le=MAX_LAYERS), Field(description="first layer, counted from 0")]
    stop: Annotated[int, Meta(ge=1, le=MAX_LAYERS), Field(description="number of the last layer + 1")]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a layer range needs 0 <= start < stop, got {self.start}..{self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def roles(self, layer_count: int) -> tuple[Role, ...]:
        """Roles of a node with these layers of a model of layer_count layers."""
        roles: list[Role] = []
        if self.start == 0:
            roles.append(Role.DRIVER)
        if self.start > 0 and self.stop < layer_count:
            roles.append(Role.WORKER)
        if self.stop == layer_count:
            roles.append(Role.VALIDATOR)
        return tuple(roles)


def is_loopback(host: str) -> bool:
    """Whether a host, an IPv6 address also in brackets, is reachable from this computer only."""
    try:
        return host == "localhost" or ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class ShardRange(_Range, frozen=True, order=True):
    """Shards start, start + 1, ... stop - 1 of a data set. The bounds apply to ranges that peers send."""

    start: Annotated[int, Meta(ge=0, le=MAX_SHARDS)]
    stop: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a range of shards needs 0 <= start < stop, got {self.start}..{self.stop}")


@dataclass(frozen=True)
class DataPosition:
    """A node's position in its data: the resume point, exact to one window.

    `order` counts along the node's deterministic assignment (it may exceed the number of shards: then it
    wraps and `order // assigned` is the pass), `window` is the next unread window of that shard's permutation.
    """

    order: int
    shard: ShardId
    window: int
