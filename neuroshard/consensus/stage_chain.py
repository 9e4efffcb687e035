"""The chain of one stage at this node: its foundation, its certified values, its file, and requests for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median_low
from typing import Protocol

import anyio.to_thread
import msgspec
from msgspec import Struct

from neuroshard.config.state_file import make_folder, read_bounded, write_atomically
from neuroshard.consensus.chain import AstrayError, Chain, ChainError, ChainLedger, ChainProof, ForkError, Step
from neuroshard.consensus.committee import LARGEST_HEIGHT, AppliedVersion, Height
from neuroshard.consensus.foundation import Founding
from neuroshard.consensus.round_messages import MAX_ROUND_CLAIM_BYTES, Quorum, Vote
from neuroshard.consensus.sync_strategies import StageRounds
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import StorageError
from neuroshard.identity import read_claim
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import ScoreReason
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import LyingDonorError, StageName
from neuroshard.types import HexDigest, NodeId
from neuroshard.waiting import Signal

_LOG = logging.getLogger(__name__)

UNFOUNDED = (
    "No step completes: this stage has no foundation, or two that contradict each other. Start a node with the wallet "
    "of the run's owner. If two contradict each other, the owner decides: `neuroshard run refound`. If the owner is "
    "gone, you can continue from your own state: `neuroshard run branch`."
)
FILE = "chain.msgpack"
MAX_CHAIN_BYTES = 64 << 20  # of 4,096 changes of the committee


class StoredChain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest certified state of a stage as a file keeps it, with its proof."""

    statement: str
    proof: ChainProof


class ChainStore(Protocol):
    """Keeps the chain of one stage. Its methods block."""

    def read(self) -> StoredChain | None:
        """The stored chain; None if there is none that can be read: other nodes have it."""
        ...

    def write(self, chain: StoredChain) -> None:
        """Replace the stored chain. Raises StorageError."""
        ...


class InMemoryChainStore:
    """A chain store for tests and for nodes without a disk."""

    def __init__(self) -> None:
        self.stored: StoredChain | None = None

    def read(self) -> StoredChain | None:
        return self.stored

    def write(self, chain: StoredChain) -> None:
        self.stored = chain


class FileChainStore:
    """The chain in a file next to the votes. Its signatures are verified when it is read."""

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        """`data_dir` is the node's folder above it, which a running node must not create again."""
        self._folder = folder
        self._data_dir = data_dir

    def read(self) -> StoredChain | None:
        try:
            data = read_bounded(self._folder / FILE, MAX_CHAIN_BYTES)
            return None if data is None else msgpack_decoder(StoredChain).decode(data)
        except (OSError, StorageError, ValueError, RecursionError) as error:
            _LOG.warning("The chain in %s cannot be read: %s Other nodes send it.", self._folder, error)
            return None

    def write(self, chain: StoredChain) -> None:
        try:
            make_folder(self._folder, self._data_dir)
            write_atomically(self._folder / FILE, msgspec.msgpack.encode(chain))
        except OSError as error:
            raise StorageError(f"The chain could not be written to {self._folder}: {error}.", "Make room.") from None


def proven_chain(store: ChainStore, founding: Founding) -> Chain:
    """The chain that a store proves from a foundation; one without any value if it proves none. Blocks.

    A chain of another line counts if it shows that no heir replaces that line.
    """
    stored = store.read()
    line = None if stored is None else founding.line(stored.statement)
    if stored is not None and line is not None:
        try:
            chain = Chain.founded(line).proven(stored.proof)
        except ChainError as error:
            _LOG.warning("A stored chain is not used: %s", error)
        else:
            return chain if chain.line_in(founding) is line else Chain.founded(founding)
    return Chain.founded(founding)


@dataclass(frozen=True)
class CertifiedState:
    """An outer state that a value of the chain leads to."""

    certificate: Quorum

    @property
    def place(self) -> tuple[int, str]:
        """Outer step and root, which name the state."""
        return self.certificate.value.outer_step, self.certificate.value.next_root

    @cached_property
    def certified_at(self) -> float:
        """Lower median of the dates that the voters signed, in seconds since the epoch."""
        claims = (read_claim(vote.claim, Vote, MAX_ROUND_CLAIM_BYTES) for vote in self.certificate.votes)
        return median_low([claim.issued_at for claim in claims])


def certified_states(chain: Chain, archived: Iterable[bytes] = ()) -> dict[tuple[int, str], CertifiedState]:
    """The states that a chain certifies, by outer step and root: those of its last values, and archived ones.

    Of values with entries only, which lead to the same state, the first one counts. Raises ChainError for an archived
    certificate that is not of this chain.
    """
    older = sorted((archived_value(chain, each) for each in archived), key=lambda each: each.value.height)
    states = dict[tuple[int, str], CertifiedState]()
    for certificate in (*older, *chain.recent):
        state = CertifiedState(certificate)
        states.setdefault(state.place, state)
    return states


def archived_value(chain: Chain, data: bytes) -> Quorum:
    """Read a certificate of a height whose value the chain may not have.

    The committee of that height must have signed it. Nothing shows that it is of the chain's line, but where the ledger
    or a waypoint has another value, it is refused. Raises ChainError.
    """
    try:
        certificate: Quorum = msgpack_decoder(Quorum).decode(data)
    except (ValueError, RecursionError) as error:
        raise ChainError(f"An archived certificate cannot be read: {str(error)[:200]}") from None
    value = certificate.value
    if value.height > chain.standing.height:
        raise ChainError(f"An archived certificate has height {value.height}, which the chain does not have yet.")
    chain.extended(certificate)
    milestones = (*chain.ledger.milestones, *(point.milestone for point in chain.points))
    if any(each.height == value.height and each.value != value.digest for each in milestones):
        raise ChainError(f"An archived certificate of height {value.height} is of another line.")
    return certificate


class StageChain:
    """Belongs to the event loop."""

    def __init__(
        self,
        founding: Callable[[], Founding | None],
        store: ChainStore,
        offload: BlockingRunner = anyio.to_thread.run_sync,
    ) -> None:
        """`founding` returns the foundation that the run's owner has signed for the stage, if it is known here."""
        self._founding = founding
        self._store = store
        self._offload = offload
        self._chain: Chain | None = None
        self._refuted = ""  # the last line of an heir that the chain here has shown to be void
        self.fork: ForkError | None = None  # this node votes for nothing and follows nothing until a foundation
        self.changed = Signal()

    @property
    def chain(self) -> Chain | None:
        """The chain of the epoch that applies; None while the stage has no foundation, or two that contradict."""
        founding = self._founding()
        if founding is None:
            return None
        if founding.others and self._chain is not None:
            founding = self._line(self._chain, founding)
        if self._chain is None or self._chain.statement != founding.statement:
            self._chain, self.fork = Chain.founded(founding), None
        elif self._chain.points != founding.points:
            self._chain = self._bound(self._chain, founding)
        return self._chain

    def _line(self, chain: Chain, founding: Founding) -> Founding:
        line = chain.line_in(founding)
        if line is not founding and self._refuted != founding.statement:
            self._refuted = founding.statement
            _LOG.error(
                "An heir continues stage %d on a line that this node does not follow: the chain here has another heir, "
                "or several seats. A node on that line trains apart. The run's owner can end it: "
                "`neuroshard run refound`.",
                chain.start.stage + 1,
            )
        return line

    @staticmethod
    def _bound(chain: Chain, founding: Founding) -> Chain:
        """The chain with the newest points; if it does not pass through one, a chain without any value."""
        try:
            return chain.bound_to(founding.points)
        except AstrayError as error:
            _LOG.error("%s This node follows the others.", error.message)
            return Chain.founded(founding)

    @property
    def ledger(self) -> ChainLedger | None:
        """The ledger after the newest value; None while there is no chain."""
        chain = self.chain
        return None if chain is None else chain.ledger

    @property
    def versions(self) -> Sequence[AppliedVersion]:
        """The certified versions of the run's parameters, also while the foundation does not apply."""
        return () if self._chain is None else self._chain.ledger.versions

    def counts(self, node: NodeId) -> bool:
        """Whether accepted work or the owner's word speaks for a node, so that it is more than a free name."""
        ledger = self.ledger
        return ledger is None or ledger.counts(node) or node in ledger.named_nodes

    @property
    def obstacle(self) -> str:
        """The reason why the chain cannot continue here, and the action that helps; "" if there is none."""
        if self.chain is None:
            return UNFOUNDED
        return "" if self.fork is None else f"{self.fork.message} {self.fork.action}"

    @property
    def last(self) -> Chain | None:
        """The chain that this node followed last, also while its foundation does not apply."""
        return self.chain or self._chain

    async def load(self) -> None:
        """Read the stored chain."""
        founding = self._founding()
        if founding is not None:
            self._chain = await self._offload(partial(proven_chain, self._store, founding))

    def step(self, rounds: StageRounds, own: ReplicaStatus) -> Step | None:
        """The step that follows the state of this node's replica; None if the chain does not lead to this state."""
        chain = self.chain
        place = None if chain is None or self.fork is not None else chain.place_of(own.root, own.outer_step)
        if chain is None or place is None:
            return None
        return rounds.step(own.outer_step, own.root, place[0], place[1], chain.owner)

    def is_newest(self, own: ReplicaStatus) -> bool:
        """Whether this node's replica has the newest state that the chain certifies."""
        chain = self.chain
        return chain is not None and bool(own.root) and chain.standing.is_state(own.root, own.outer_step)

    async def extend(self, certificate: Quorum) -> None:
        """Add a certified value and store the chain. A failed write is only reported.

        A value that does not follow is not an error: a newer proof may be known. A fork stays in `fork`.
        """
        chain = self.chain
        if chain is None:
            return
        try:
            await self._adopt(partial(chain.extended, certificate))
        except ChainError as error:
            if not isinstance(error, ForkError):
                _LOG.debug("%s", error)

    def add_earlier(self, certificates: Iterable[Quorum]) -> None:
        """Remember values before the newest ones, so that the steps after them have a place."""
        if self.chain is not None:
            self._chain = self.chain.with_earlier(certificates)

    async def learn(self, proof: ChainProof) -> None:
        """Continue from the newest value of a proof, if it is newer. Raises ChainError or ForkError."""
        chain = self.chain
        if chain is None:
            raise ChainError("The stage has no foundation here.")
        await self._adopt(partial(chain.proven, proof))

    async def learn_from(self, asking: ReplicaClient, stage: StageName, peers: Sequence[NodeId]) -> None:
        """Ask these nodes for the chain, all at once, and continue from whatever any of them proves."""
        known = self.chain
        if known is None:
            return

        async def learn(peer: NodeId) -> None:
            proof = await ask_chain(asking, stage, known, peer)
            with asking.blaming(peer):
                try:
                    await self.learn(proof)
                except ForkError:
                    return  # it stays in `fork`
                except AstrayError as error:
                    _LOG.warning("Node %s: %s Its chain is not followed.", peer, error.message)
                except ChainError as error:
                    raise LyingDonorError(f"Its chain is not valid: {error.message}") from None

        await ask_replicas(peers, learn, at_once=MOST_ASKED)

    async def _adopt(self, made: Callable[[], Chain]) -> None:
        before = self._chain
        try:
            chain = made()
        except ForkError as error:
            if self.fork is None:
                _LOG.error("%s", error)
            self.fork = error
            self.changed.notify()
            raise
        if chain is before:
            return
        self._chain = chain
        self.changed.notify()
        try:
            await self._offload(partial(self._store.write, StoredChain(chain.statement, chain.proof())))
        except StorageError as error:
            _LOG.error("%s Other nodes have the chain.", error)


# The request for a chain

CHAIN = "round/chain"
MAX_PROOF_BYTES = 16 << 20
ANSWER_SECONDS = 20.0
MOST_ASKED = 16


class ChainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the chain of a stage since this foundation, with its last values above a height."""

    stage: StageName
    statement: HexDigest
    height: Height = LARGEST_HEIGHT


class ChainAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The proof is the frame's tensor."""


CHAIN_LIMITS = FrameLimits(max_header_bytes=1024, message=ChainRequest)
CHAIN_ANSWER_LIMITS = FrameLimits(max_header_bytes=1024, max_body_bytes=MAX_PROOF_BYTES, message=ChainAnswer)


def chain_answer(proof: ChainProof) -> Frame:
    """The answer with the proof."""
    data = msgspec.msgpack.encode(proof)
    return Frame(CHAIN, ChainAnswer(), (TensorPart(TensorSpec("proof", "uint8", (len(data),)), data),))


async def ask_chain(asking: ReplicaClient, stage: StageName, known: Chain, peer: NodeId) -> ChainProof:
    """Ask one node for the chain of a stage from the known one on. Raises DonorError."""
    with asking.blaming(peer):
        request = Frame(CHAIN, ChainRequest(stage, known.statement, known.standing.height))
        answer = await asking.ask(peer, request, CHAIN_ANSWER_LIMITS, ANSWER_SECONDS)
        return await asking.offload(partial(_read, answer))


async def newest_chain(asking: ReplicaClient, stage: StageName, known: Chain, peers: Sequence[NodeId]) -> Chain:
    """The newest chain that any of these nodes proves. Raises ForkError if two nodes prove different values.

    One honest answer is enough, however many others invent something: only what the foundation's seats have
    signed counts.
    """

    async def ask(peer: NodeId) -> Chain:
        proof = await ask_chain(asking, stage, known, peer)
        with asking.blaming(peer):
            try:
                return await asking.offload(partial(known.proven, proof))
            except AstrayError as error:
                _LOG.warning("Node %s: %s Its chain is not followed.", peer, error.message)
                return known
            except ChainError as error:
                raise LyingDonorError(f"Its chain is not valid: {error.message}") from None

    found = await ask_replicas(list(peers), ask, at_once=MOST_ASKED)
    newest = known
    for chain in found.values():
        if chain.standing.height > newest.standing.height:
            newest = chain
        elif chain.tip is not None and chain.standing.height == newest.standing.height:
            newest.proven(chain.proof())  # raises ForkError for another value
    return newest


def _read(answer: Frame) -> ChainProof:
    """Raises LyingDonorError."""
    try:
        return msgpack_decoder(ChainProof).decode(b"".join(part.data for part in answer.tensors))
    except (ValueError, RecursionError) as error:
        raise LyingDonorError(f"Its chain cannot be read: {str(error)[:200]}", ScoreReason.MALFORMED_FRAME) from None
