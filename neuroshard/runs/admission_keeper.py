"""A node's admission to an organised run: it is kept fresh, shown to the other nodes, and stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import anyio
from msgspec import Meta, Struct

from neuroshard import __version__
from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import DataError, NetworkRefusedError, StorageError, UsageError
from neuroshard.identity import NodeIdentity
from neuroshard.identity.admissions import (
    MAX_NAME_CHARACTERS,
    REFRESH_SECONDS,
    AdmissionBytes,
    JoinClaim,
    read_admission,
)
from neuroshard.identity.invitations import Invitation, InvitationError
from neuroshard.membership.connectivity import KnownAddresses, Networking
from neuroshard.membership.run_members import RunMembers
from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
from neuroshard.network.libp2p.addresses import Scope, may_be_reported, parse_address, scope_of
from neuroshard.runs.authority_key import organiser_address
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.organiser_client import (
    LEAST_POLL_SECONDS,
    Admittance,
    OrganiserClient,
    OrganiserRefusedError,
    QueuePlace,
    http_client,
    organiser_url,
)
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.types import (
    LOOPBACK,
    MAX_ADDRESS_CHARACTERS,
    LayerRange,
)

_LOG = logging.getLogger(__name__)

AGAIN_SECONDS = 600.0  # until a node whose place was refused asks again
LEAVE_SECONDS = 3.0  # of a node that ends, for its last request
OPENING_SECONDS = 15.0  # in which a node that starts waits for its own addresses
MAPPING_SECONDS = 2.0  # of them: behind a router, for a port that it maps
MOVED_SECONDS = 90.0  # between looks for other addresses; the organiser checks one address once per minute


class OwnAdmission(Struct, frozen=True):
    """The admission of this computer's node, and the organiser that gave it."""

    organiser: Annotated[str, Meta(max_length=1000)]
    admission: AdmissionBytes
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""  # that the organiser was given last
    reachable: bool | None = None
    places: tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...] = ()  # at the join, as `direct_places`


class AdmissionKeeper:
    """Gets and keeps this node's admission to one run. `trouble` is a sentence for the owner, or ""."""

    def __init__(
        self,
        client: OrganiserClient,
        url: str,
        file: StateFile[OwnAdmission],
        now: Callable[[], float],
        networking: Networking | None = None,
    ) -> None:
        """`networking` learns the addresses of members, and has this node's own; None: neither."""
        self._client = client
        self.url = url
        self._file = file
        self._now = now
        self._networking = networking
        self._shown: Admittance | None = None
        self._name = client.name  # that the organiser knows
        self._name_refusal = ""  # why it does not take the owner's name
        self._places: tuple[str, ...] = ()  # direct addresses with which this node asked the organiser last
        self.trouble = ""

    @property
    def layers(self) -> LayerRange | None:
        """The layers for which the organiser admitted this node; None without an admission, or for a trainer."""
        return None if self._shown is None else self._shown.admission.layers

    @property
    def reachable(self) -> bool | None:
        """Whether the organiser reached this node from outside; None: not checked."""
        return None if self._shown is None else self._shown.reachable

    def restore(self, offer: RunOffer, identity: NodeIdentity) -> bool:
        """Show the stored admission of this node; return whether it is live. Raises StorageError."""
        self._shown = self._stored(offer, identity)
        return self._shown is not None

    def _stored(self, offer: RunOffer, identity: NodeIdentity) -> Admittance | None:
        held = self._file.read()
        if held is None:
            return None
        try:
            admission = read_admission(
                held.admission, offer.run_id, tuple(map(bytes.fromhex, offer.parameters.authority))
            )
        except DataError as error:
            _LOG.warning("The stored admission is not used: %s", error)
            return None
        is_own = admission.node == identity.node_id and admission.wallet == identity.wallet_id
        self._name, self._places = held.name, held.places
        is_live = is_own and self._now() <= admission.expires_at
        return Admittance(held.admission, admission, reachable=held.reachable) if is_live else None

    async def admit(self, report: Callable[[str], None], place: QueuePlace | None = None) -> None:
        """Wait for a place, and store the admission. Raises like `OrganiserClient.admit`, and StorageError.

        `place` receives each answer about the queue.
        """
        self._keep(await self._joined(report, place))

    @property
    def _is_renamed(self) -> bool:
        """Whether the organiser must still learn the owner's name."""
        return self._name != self._client.name and not self._name_refusal

    @property
    def _has_moved(self) -> bool:
        """Whether this node has other direct addresses than those with which it joined."""
        network = None if self._networking is None else self._networking.current
        return network is not None and direct_places(network.transport.addresses()) != self._places

    async def _joined(self, report: Callable[[str], None], place: QueuePlace | None = None) -> Admittance:
        addresses = await self._own_addresses()
        self._places = direct_places(addresses)
        admittance = await self._client.admit(report, addresses, self._learn, place)
        if self._networking is not None:
            self._networking.book.try_all_again()  # the run's relay connects only admitted nodes
        self._name = self._client.name
        return admittance

    async def _own_addresses(self) -> Sequence[str]:
        """The addresses of this node. At its start it waits a little for its network and for a port at its router."""
        if self._networking is None or not self._networking.is_wanted:
            return ()
        with anyio.move_on_after(OPENING_SECONDS):
            transport = (await self._networking.up()).transport
            with anyio.move_on_after(MAPPING_SECONDS):
                while is_private(transport.addresses()):
                    await anyio.sleep(0.1)
            return transport.addresses()
        return ()

    async def run(self, members: RunMembers) -> None:
        """Show the admission to the other nodes and renew it at half of its time, until cancelled.

        A node whose direct addresses change joins again, which keeps its place, so that they are checked. While the
        organiser is away, the node works on: the others accept the admission that they know. At the end the organiser
        hears that the node leaves.
        """
        try:
            while True:
                shown = self._shown
                if shown is not None:
                    members.renew(shown.data, shown.ended)
                if shown is not None and not self._is_renamed:
                    refresh_at = shown.admission.admitted_at + REFRESH_SECONDS
                    await self._rest(refresh_at)
                await self._renew(is_known=shown is not None)
        finally:
            with anyio.move_on_after(LEAVE_SECONDS, shield=True):
                await self._client.leave()

    async def _rest(self, until: float) -> None:
        """Sleep until a time, or until this node has moved."""
        await anyio.sleep(min(MOVED_SECONDS, max(LEAST_POLL_SECONDS, until - self._now())))
        while not self._has_moved and (left := until - self._now()) > 0:
            await anyio.sleep(min(MOVED_SECONDS, left))

    async def _renew(self, *, is_known: bool) -> None:
        """Wait for the next admission. It counts even if it cannot be stored: the others see it.

        A node whose owner changed its name joins again, which keeps its place.
        """
        while True:
            is_move = is_known and self._has_moved and not self._is_renamed
            is_join = not is_known or self._is_renamed or is_move
            try:
                admittance = await (self._joined(self._note) if is_join else self._client.refresh())
                break
            except OrganiserRefusedError as error:
                if is_known and error.code == "no_place":
                    is_known = False  # the node joins at once, and waits after a refusal of that
                    continue
                if is_known and is_join and error.code == "already_admitted":
                    self._name_refusal = str(error)  # the place matters more than the name
                    continue
                if is_move:  # a wallet that is no longer on the list keeps its place, but may not join
                    continue
                self._note(str(error))
                await anyio.sleep(AGAIN_SECONDS)
            except NetworkRefusedError as error:
                self._note(f"{error} This computer works on with its last admission.")
        try:
            self._keep(admittance)
            self.trouble = self._name_refusal
        except StorageError as error:
            self._note(str(error))

    def _keep(self, admittance: Admittance) -> None:
        self._shown = admittance
        self._learn(admittance.seeds)
        self._file.write(OwnAdmission(self.url, admittance.data, self._name, admittance.reachable, self._places))

    def _learn(self, seeds: Sequence[str]) -> None:
        if self._networking is not None:
            learn_seeds(self._networking.book, self.url, seeds)

    def _note(self, sentence: str) -> None:
        if sentence != self.trouble:
            _LOG.warning("%s", sentence)
        self.trouble = sentence


def direct_places(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those of a node's addresses that lead through no relay, in order."""
    return tuple(sorted(text for text in addresses if _scope(text) is not None))


def is_private(addresses: Sequence[str]) -> bool:
    """Whether a node with these addresses is behind a router that maps no port to it (yet)."""
    scopes = set(map(_scope, addresses))
    return Scope.NETWORK in scopes and Scope.WORLD not in scopes


def _scope(text: str) -> Scope | None:
    """The scope of a direct address; None for another one."""
    try:
        address = parse_address(text)
    except UsageError:
        return None
    return None if address.is_relayed else scope_of(address.host)


def learn_seeds(book: KnownAddresses, url: str, seeds: Sequence[str]) -> None:
    """Add addresses that the organiser at a URL reports, but no private ones if the organiser is far away."""
    host = urlsplit(url).hostname or ""
    teller = LOOPBACK if host == "localhost" else host if _is_ip(host) else None
    for text in seeds:
        try:
            address = parse_address(text)
        except UsageError:
            continue
        is_name = not _is_ip(address.host)
        if is_name or may_be_reported(address.host, teller):
            # the book does not dial other hosts on the word of a peer
            book.add([text], is_near=is_name or scope_of(address.host) is not Scope.WORLD)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def keeper_of(
    settings: Settings,
    identity: NodeIdentity,
    offer: Callable[[], RunOffer],
    now: Callable[[], float],
    invitation: Invitation | None = None,
    *,
    networking: Networking | None = None,
    holds_layers: bool = True,
) -> AdmissionKeeper | None:
    """The keeper of this node's admission; None if the run or the wallet needs none, or no organiser is known.

    The organiser is that of the setting, of the invitation, or the one that admitted this node before. A node that
    holds no layers asks for the place of a trainer. Raises StorageError.
    """
    run = offer()
    if run.parameters.admission != "admitted" or identity.wallet_id == run.owner:
        return None
    file = admission_file(settings.data_dir, run)
    url = organiser_url(settings, run.run_id, invitation)
    if url is None:
        held = file.read()
        url = None if held is None else held.organiser
    if url is None:
        return None
    own = StoredPasses(settings.data_dir, run).own(identity.wallet_id)
    claim = JoinClaim(
        run.run_id,
        role="worker" if holds_layers else "trainer",
        device=settings.device,
        memory_mb=tier_mb(available_mb(probe_memory(), settings.memory)),
        release=__version__,
        name=settings.public_name or "",
        invitation=None if own is None else own.member_pass,
    )
    client = OrganiserClient(url, identity, offer, claim, now, open_http=lambda: http_client(url))
    return AdmissionKeeper(client, url, file, now, networking)


def admission_file(data_dir: Path, offer: RunOffer) -> StateFile[OwnAdmission]:
    """The file with this node's admission to a run."""
    return StateFile(
        data_dir / "runs" / "joined" / f"{offer.run_id}.admission",
        OwnAdmission,
        "set_aside",
        "this computer asks the organiser again",
        data_dir=data_dir,
    )


def organiser_to_name(settings: Settings, offer: RunOffer) -> str | None:
    """The https address of a run's organiser for invitations and join lines; None if none is known.

    It is that of the setting, that of this computer's own organiser, or the one that admitted this node. Raises
    StorageError.
    """
    if offer.parameters.admission != "admitted":
        return None
    own = organiser_address(settings.data_dir, offer.run_id).read()
    held = admission_file(settings.data_dir, offer).read()
    known = (settings.organiser, own and own.url, held and held.organiser)
    return next((url for url in known if url and url.startswith("https://")), None)


def check_entry(settings: Settings, identity: NodeIdentity, offer: RunOffer, invitation: Invitation | None) -> None:
    """Raise InvitationError if an organised run has no way in for this node, and StorageError."""
    keeper = keeper_of(settings, identity, lambda: offer, lambda: 0.0, invitation)
    if offer.parameters.admission != "admitted" or identity.wallet_id == offer.owner or keeper is not None:
        return
    if StoredPasses(settings.data_dir, offer).own(identity.wallet_id) is None:
        raise InvitationError(
            f"Run {offer.run_id[:16]} is an organised run, and this computer does not know its organiser.",
            "Start with --organiser URL.",
        )
