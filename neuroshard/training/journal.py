"""What a driver has sent and no step has used yet, so that a checkpoint knows where data go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from neuroshard.training.microbatch import MicrobatchKey
from neuroshard.training.pipeline import MicrobatchResult
from neuroshard.types import DataPosition


@dataclass(frozen=True)
class OwnShare:
    """The part of a step that this node drove itself."""

    position: DataPosition | None = None  # all windows before it are behind a step; None: it has not moved
    loss_sums: tuple[Tensor, ...] = ()
    tokens: int = 0  # of those losses

    def mean_loss(self) -> float | None:
        """Nats a token; None when it drove nothing."""
        return sum(part.item() for part in self.loss_sums) / self.tokens if self.tokens else None


@dataclass
class _Sent:
    position: DataPosition
    result: MicrobatchResult | None = None
    is_done: bool = False
    is_behind: bool = False


class Journal:
    """The microbatches under way, in the order of their data."""

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is told when a microbatch is under way no more."""
        self._sent: dict[MicrobatchKey, _Sent] = {}
        self._ended = ended

    @property
    def under_way(self) -> int:
        """Microbatches that some stage has not accumulated yet, and that were not given up."""
        return sum(not (sent.is_done or sent.is_behind) for sent in self._sent.values())

    @property
    def done(self) -> tuple[MicrobatchKey, ...]:
        """Microbatches that every stage has accumulated and no step is known to have used."""
        return tuple(key for key, sent in self._sent.items() if sent.is_done and not sent.is_behind)

    def tokens(self, keys: Iterable[MicrobatchKey]) -> int:
        """Of microbatches whose loss was told."""
        return sum(sent.result.token_count for key in keys if (sent := self._sent[key]).result is not None)

    def sent(self, key: MicrobatchKey, position: DataPosition) -> None:
        """A microbatch leaves; `position` is the first window behind it."""
        self._sent[key] = _Sent(position)

    def measured(self, key: MicrobatchKey, result: MicrobatchResult) -> None:
        """The last stage has told its loss."""
        if key in self._sent:
            self._sent[key].result = result

    def accumulated(self, key: MicrobatchKey) -> None:
        """Every stage has done its work for it."""
        if key in self._sent:
            self._sent[key].is_done = True
            self._ended()

    def stepped(self, keys: Iterable[MicrobatchKey]) -> OwnShare:
        """A step was made of these microbatches, some of which may be other drivers'."""
        own = [self._sent[key] for key in keys if key in self._sent]
        for sent in own:
            sent.is_behind = True
        results = [sent.result for sent in own if sent.result is not None]
        loss_sums = tuple(result.loss_sum for result in results)
        return OwnShare(self._advance(), loss_sums, sum(result.token_count for result in results))

    def dropped(self, key: MicrobatchKey) -> None:
        """A microbatch was given up for good: its data are not used again."""
        if key in self._sent:
            self._sent[key].is_behind = True
            self._ended()

    def clear(self) -> None:
        """Nothing is under way any more."""
        self._sent.clear()

    def _advance(self) -> DataPosition | None:
        """Forget what is behind without a gap; the position behind it."""
        position = None
        for key, sent in list(self._sent.items()):
            if not sent.is_behind:
                break
            position = sent.position
            del self._sent[key]
        return position
