"""Many nodes that report to each other inside one process, under a virtual clock: who knows whom, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import anyio
import trio
from trio.testing import MockClock

from benchmarks.record import Report, Row
from benchmarks.sizes import size
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.membership.claim_intake import REPORT_RULES, ClaimCache, ClaimIntake
from neuroshard.membership.reporting import Listener, Reporter
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import InMemoryNetwork, Link, TransportClosedError
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId, Role, RunId, ShardId

EPOCH = 1_700_000_000.0
RUN = RunId(sha256(b"membership").hexdigest())
TOPIC = f"reports/{RUN}/0"
HOP_SECONDS = 0.05
START_SECONDS = 0.5  # in which all nodes find their neighbours
SETTLE_SECONDS = 15.0
WINDOW_SECONDS = 60.0
SIZES = size((100, 300, 1000), (6, 12))


@dataclass(frozen=True)
class Outcome:
    """What one simulated swarm did."""

    nodes: int
    converged_after: float | None  # seconds until every node knew every other; None: not within SETTLE_SECONDS
    known: int  # pairs (node, other) at the end, nodes x (nodes - 1) when complete
    bytes_per_second: float  # received by a node in the window, all copies of reports
    copies_per_second: float
    bytes_a_copy: float
    cpu_seconds: float


@dataclass
class Swarm:
    """A swarm of simulated nodes; only the signatures are verified once for all of them instead of once by each."""

    count: int
    seed: int = 0
    network: InMemoryNetwork = field(init=False)
    memberships: dict[NodeId, Membership] = field(default_factory=dict[NodeId, Membership])
    identities: list[NodeIdentity] = field(default_factory=list[NodeIdentity])

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.network = InMemoryNetwork(self.random, default_link=Link(HOP_SECONDS), now=clock)
        self.cache = ClaimCache(REPORT_RULES)
        self.identities = [identity_of(number) for number in range(self.count)]

    async def live(self, identity: NodeIdentity) -> None:
        """One node, until it is killed."""
        self.network.join(identity.node_id)
        membership = Membership(identity.node_id, identity.wallet_id)
        self.memberships[identity.node_id] = membership
        intake = ClaimIntake(REPORT_RULES, RUN, clock, self.cache)
        listener = Listener(intake, membership, TOPIC, now=clock)
        reporter = Reporter(identity, RUN, TOPIC, Progress(identity), membership, now=clock, random=self.random)
        network = self.network.network_of(identity.node_id)
        with ends_with_network():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.listen_forever, network)
                await anyio.sleep(START_SECONDS)
                tasks.start_soon(reporter.report_forever, network)

    def known_pairs(self) -> int:
        """How many other nodes all nodes together know."""
        return sum(len(membership.view.members) - 1 for membership in self.memberships.values())

    def traffic(self) -> tuple[int, int]:
        """Copies and bytes that all nodes received so far."""
        looks = [self.network.traffic_of(identity.node_id) for identity in self.identities]
        return sum(look.messages_received for look in looks), sum(look.bytes_received for look in looks)


def clock() -> float:
    """Seconds since the epoch, virtual."""
    return EPOCH + trio.current_time()


def identity_of(number: int) -> NodeIdentity:
    """A node with a wallet of its own."""
    wallet = Wallet.from_secret(TokenSecret("hex", number.to_bytes(32, "big")))
    key = NodeKey.from_seed(number.to_bytes(32, "little"))
    delegation = Delegation.issue(wallet, key.public_key, EPOCH + 86_400)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)


@contextmanager
def ends_with_network() -> Iterator[None]:
    """A node ends without a word when its network is closed."""
    try:
        yield
    except* TransportClosedError:
        pass


@dataclass(frozen=True)
class Progress:
    """Steady progress of one node that began at EPOCH: one step of 4,096 tokens every 2 seconds."""

    identity: NodeIdentity

    def __call__(self) -> TrainingReport:
        """The report as of now."""
        steps = 100 + int(trio.current_time() / 2)
        digest = sha256(self.identity.node_id.encode()).digest()
        return TrainingReport(
            run_id=RUN,
            sequence=0,
            steps=steps,
            tokens=steps * 4096,
            loss_ema=3.0 + digest[0] / 256,
            shard=ShardId(digest[1]),
            shards_seen=1 + digest[2] % 8,
            roles=(Role.DRIVER, Role.VALIDATOR),
            layers=LayerRange(0, 12),
            outer_step=steps // 500,
            state_hash=digest.hex(),
            successful_syncs=0,
            failed_syncs=0,
            tokens_per_second=2048.0,
            state=NodeState.TRAINING,
            started_at=EPOCH,
            interval_seconds=10.0,
        )


def simulate(count: int, settle_seconds: float = SETTLE_SECONDS, window_seconds: float = WINDOW_SECONDS) -> Outcome:
    """A swarm whose nodes all start at once, then a look at a stretch of ordinary time."""
    started = time.process_time()
    swarm = Swarm(count)
    outcomes: list[Outcome] = []

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for identity in swarm.identities:
                tasks.start_soon(swarm.live, identity)
            converged = await _convergence(swarm, settle_seconds)
            before = swarm.traffic()
            await anyio.sleep(window_seconds)
            copies, size = (now - then for now, then in zip(swarm.traffic(), before, strict=True))
            per_second = count * window_seconds
            outcomes.append(
                Outcome(
                    nodes=count,
                    converged_after=converged,
                    known=swarm.known_pairs(),
                    bytes_per_second=size / per_second,
                    copies_per_second=copies / per_second,
                    bytes_a_copy=size / copies,
                    cpu_seconds=time.process_time() - started,
                )
            )
            swarm.network.close()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    return outcomes[0]


async def _convergence(swarm: Swarm, settle_seconds: float) -> float | None:
    """Lets the swarm settle and tells when every node knew every other."""
    wanted = swarm.count * (swarm.count - 1)
    converged: float | None = None
    while anyio.current_time() < settle_seconds:
        await anyio.sleep(0.1)
        if converged is None and swarm.known_pairs() == wanted:
            converged = anyio.current_time()
    return converged


def measure() -> Report:
    """The same swarm in three sizes."""
    outcomes = [simulate(size) for size in SIZES]
    small, large = outcomes[0], outcomes[-1]
    ratio = large.bytes_per_second / small.bytes_per_second
    everybody = all(outcome.known == outcome.nodes * (outcome.nodes - 1) for outcome in outcomes)
    rows = [
        Row(f"gossip received, {large.nodes} nodes / {small.nodes} nodes", f"{ratio:.2f}", "<= 1.3", ratio <= 1.3),
        Row("every node knows every other", "yes" if everybody else "no", "yes", everybody),
    ]
    rows += [Row(f"{outcome.nodes} nodes", _words(outcome), "report", None) for outcome in outcomes]
    way = f"Reports over the in-memory network under a virtual clock, {HOP_SECONDS * 1e3:.0f} ms a hop, a mesh of about"
    notes = (
        f"{way} six neighbours; signatures are real and verified once for all simulated nodes.",
        "The gossip is the in-memory network's, not libp2p's, which sends less: see the idle node of `meeting`.",
        "All nodes start at the same moment; the window begins 15 s later. Bytes are topic, id and packed report.",
    )
    return Report("membership", "Membership of many nodes (simulated, in-memory gossip)", tuple(rows), notes)


def _words(outcome: Outcome) -> str:
    converged = "never" if outcome.converged_after is None else f"{outcome.converged_after:.1f} s"
    return (
        f"converged after {converged}; {outcome.bytes_per_second * 8 / 1e3:.0f} kbit/s received a node, "
        f"{outcome.copies_per_second:.0f} copies/s of {outcome.bytes_a_copy:.0f} bytes; {outcome.cpu_seconds:.0f} CPU-s"
    )
