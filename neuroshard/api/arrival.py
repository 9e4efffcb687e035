"""Arriving at a run, for the wizard and the dashboard: invitations as their page shows them, and the first question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from neuroshard.api.problems import WrongFieldsError
from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.config.folders import expanded
from neuroshard.errors import NeuroShardError, UsageError
from neuroshard.identity.invitations import Invitation, read_invitation
from neuroshard.identity.wallet import key_words
from neuroshard.network.lan_runs import LanRuns
from neuroshard.network.line import WHOLE_LINE, upload_limit
from neuroshard.network.mdns import RunNotice
from neuroshard.runs.chosen_run import ChosenRun
from neuroshard.runs.invited_settings import reachable_peers

MOST_CHARACTERS = 100_000  # of a pasted text; a longer one is not an invitation, and not answered with a sentence
LONGEST_PATH = 4096
DAYS_OF_MONTH = 30.4
GIGABYTES_A_DAY = 10.8  # of one megabit per second
SMALLEST_TEXT_BYTES = 100_000

Answer = Literal["join", "nearby", "text"]
Purpose = Literal["join", "nearby", "text", "given"]  # given: options of the start name a run or data


class InvitedModelBody(ResponseBody):
    """The run's model, as the inviter states it."""

    parameters: int
    stages: int
    stage_mb: int = Field(
        description="memory with which a computer can hold the smallest stage, megabytes of 10^6 bytes"
    )
    fits: bool = Field(description="whether the memory limit of this computer is enough for that")


class InvitationBody(ResponseBody):
    """An invitation as its page shows it. It contains nothing that lets its reader join."""

    name: EncodableText = Field(description="of the run")
    run_id: str
    label: EncodableText = Field(description="that the inviter gave this invitation")
    inviter_words: EncodableText = Field(description="four words for the key of the run's owner")
    is_by_guest: bool = Field(description="a member that may invite made it, not the owner")
    uses: int = Field(description="number of wallets that can join with it")
    may_invite: bool = Field(description="whether the invited can invite others")
    not_after: int = Field(description="time at which it ends, seconds since 1970")
    data: list[EncodableText] = Field(description="addresses of the run's training text; empty: its nodes send it")
    nodes: int = Field(description="addresses of nodes in it that can be dialled from here")
    model: InvitedModelBody | None = Field(description="null: the invitation does not state it")
    gb_per_day: float | None = Field(description="most that this computer sends in a day at its limits; null: no limit")


class TextFolderBody(ResponseBody):
    """A folder, and the text files in it and its subfolders."""

    path: EncodableText
    files: int
    bytes: int
    is_complete: bool = Field(default=True, description="false: at least this many, or a part cannot be read")


class FolderListBody(ResponseBody):
    """A folder of this computer and its subfolders. Files and links are not listed."""

    folder: TextFolderBody
    parent: EncodableText | None = Field(description="the folder above it; null: there is none")
    folders: list[TextFolderBody]
    has_more: bool = Field(description="more folders than are listed")
    drives: list[str] = Field(description="drives of this computer on Windows; empty elsewhere")


class FolderRequest(RequestBody):
    """POST /api/setup/folders: the folder to list; null: the home folder."""

    path: str | None = Field(default=None, max_length=LONGEST_PATH)


class NearbyRunBody(ResponseBody):
    """A run that a node of the local network announces."""

    run_id: str
    name: EncodableText
    computers: int = Field(description="that take part, as the node says")


class ArrivalBody(ResponseBody):
    """The first question of the wizard, and the answer so far."""

    purpose: Purpose | None = Field(description="null: not answered yet")
    invitation: InvitationBody | None = Field(description="the one that was read last")
    link_fault: EncodableText | None = Field(description="why a link that was opened cannot be used")
    text: TextFolderBody | None
    public_run: EncodableText | None = Field(description="name of this release's own run; null: there is none yet")
    nearby: list[NearbyRunBody] | None = Field(description="runs on the local network; null: it is not searched")
    nearby_run: NearbyRunBody | None = Field(description="the one that was chosen")


class InvitationRequest(RequestBody):
    """An invitation as text: its code, a link, or the content of a file."""

    text: str = Field(max_length=MOST_CHARACTERS)


class PurposeRequest(RequestBody):
    """POST /api/setup/purpose: join the run of the invitation or one nearby, or train on text."""

    purpose: Answer
    folder: str | None = Field(default=None, max_length=LONGEST_PATH, description="with the text")
    run_id: str | None = Field(default=None, max_length=64, description="of the run nearby")


@dataclass(frozen=True)
class TextFolder:
    """A folder with text files."""

    path: Path
    files: int
    bytes: int


@dataclass(frozen=True)
class Room:
    """Limits of this computer that decide about an invitation."""

    memory_mb: int | None = None  # None: not known
    max_upload: float | None = None  # megabits per second
    monthly_quota: float | None = None  # gigabytes

    @classmethod
    def of(cls, values: Mapping[str, object], line: float) -> Room:
        """The limits among these settings, on a line with this upload in megabits per second."""
        memory, upload, quota = (values.get(key) for key in ("memory", "max_upload", "monthly_quota"))
        percent = values.get("upload_percent")
        return cls(
            int(memory) if isinstance(memory, int | float) else None,
            upload_limit(
                float(upload) if isinstance(upload, int | float) else None,
                percent if isinstance(percent, int) else WHOLE_LINE,
                line,
            ),
            float(quota) if isinstance(quota, int | float) else None,
        )

    @property
    def gb_per_day(self) -> float | None:
        """The most that this computer sends in a day; None without a limit."""
        limits = [
            limit
            for limit in (
                None if self.max_upload is None else self.max_upload * GIGABYTES_A_DAY,
                None if self.monthly_quota is None else self.monthly_quota / DAYS_OF_MONTH,
            )
            if limit is not None
        ]
        return min(limits, default=None)


def nearby_body(notice: RunNotice) -> NearbyRunBody:
    """The page's view of a run on the local network."""
    return NearbyRunBody(run_id=notice.run, name=notice.name, computers=notice.computers)


def checked_invitation(text: str, now: float, *, is_local: bool) -> Invitation:
    """Read an invitation and check everything that needs no other node. Raises InvitationError with the reason."""
    invitation = read_invitation(text)
    invitation.check(invitation.run_id, invitation.grant.owner, now)
    reachable_peers(invitation, is_local=is_local)
    return invitation


def invitation_body(invitation: Invitation, room: Room, *, is_local: bool) -> InvitationBody:
    """The page's view of an invitation that was checked."""
    grant, model = invitation.grant, invitation.model
    return InvitationBody(
        name=invitation.name,
        run_id=invitation.run_id,
        label=invitation.label,
        inviter_words=key_words(grant.owner),
        is_by_guest=grant.parent is not None,
        uses=grant.uses,
        may_invite=grant.may_invite,
        not_after=invitation.not_after,
        data=list(invitation.data),
        nodes=len(reachable_peers(invitation, is_local=is_local)),
        model=None
        if model is None
        else InvitedModelBody(
            parameters=model.parameters,
            stages=model.stages,
            stage_mb=model.stage_mb,
            fits=room.memory_mb is None or room.memory_mb >= model.stage_mb,
        ),
        gb_per_day=room.gb_per_day,
    )


@dataclass
class ArrivalDraft:
    """The first answer of the wizard. Methods raise WrongFieldsError and then change nothing."""

    find_text: Callable[[Path], TextFolder]  # raises DataError
    list_folders: Callable[[Path], FolderListBody]  # raises DataError
    is_local: bool  # whether nodes on this very computer can be peers
    public_run: str | None = None
    nearby: LanRuns | None = None  # None: the local network is not searched
    purpose: Purpose | None = None
    invitation: Invitation | None = None
    nearby_run: RunNotice | None = None
    link_fault: str | None = None
    text: TextFolder | None = None

    def view(self, room: Room) -> ArrivalBody:
        """The state as the page shows it."""
        text, invitation = self.text, self.invitation
        return ArrivalBody(
            purpose=self.purpose,
            invitation=None if invitation is None else invitation_body(invitation, room, is_local=self.is_local),
            link_fault=self.link_fault,
            text=None if text is None else TextFolderBody(path=str(text.path), files=text.files, bytes=text.bytes),
            public_run=self.public_run,
            nearby=None if self.nearby is None else [nearby_body(notice) for notice in self.nearby.current],
            nearby_run=None if self.nearby_run is None else nearby_body(self.nearby_run),
        )

    def chosen_run(self) -> ChosenRun | None:
        """The run to join; None for a run of this computer's own. A run nearby is found again by its id only."""
        if self.purpose == "join" and self.invitation is not None:
            return ChosenRun.of(self.invitation)
        if self.purpose == "nearby" and self.nearby_run is not None:
            return ChosenRun(self.nearby_run.run, self.nearby_run.name)
        return None

    def read(self, text: str, now: float) -> None:
        """Read an invitation that the owner has pasted or dropped. Nothing is dialled."""
        try:
            self.invitation = checked_invitation(text, now, is_local=self.is_local)
        except UsageError as error:
            raise WrongFieldsError(("invitation", f"{error.message} {error.action}".strip())) from None
        self.link_fault, self.purpose = None, None

    def open_link(self, text: str, now: float) -> None:
        """Show a link that was opened on this computer, or the reason against it. It answers no question."""
        try:
            self.read(text, now)
        except WrongFieldsError as error:
            self.link_fault = error.message

    def choose(self, request: PurposeRequest) -> None:
        """Answer the first question."""
        match request.purpose:
            case "join":
                if self.invitation is None:
                    raise WrongFieldsError(("invitation", "There is no invitation yet. Paste one, or open its file."))
            case "nearby":
                self.nearby_run = self._announced(request.run_id)
            case "text":
                self.text = self._found_text((request.folder or "").strip())
        self.purpose = request.purpose

    def _announced(self, run_id: str | None) -> RunNotice:
        notices = () if self.nearby is None else self.nearby.current
        found = next((notice for notice in notices if notice.run == run_id), None)
        if found is None:
            raise WrongFieldsError(
                ("run_id", "This run is no longer on the local network. Start its computer, and wait a few seconds.")
            )
        return found

    def list_folder(self, named: str | None) -> FolderListBody:
        """List a folder for the choice of text. It reads the disk, and changes nothing here."""
        try:
            return self.list_folders(Path.home() if named is None else whole_path(named))
        except (NeuroShardError, RuntimeError) as error:  # RuntimeError: this account has no home folder
            raise WrongFieldsError(("path", str(error))) from None

    def _found_text(self, named: str) -> TextFolder:
        try:
            folder = whole_path(named)
            found = self.find_text(folder)
        except NeuroShardError as error:
            raise WrongFieldsError(("folder", f"{error.message} {error.action}".strip())) from None
        if found.bytes < SMALLEST_TEXT_BYTES:
            size = f"{found.bytes / 1000:,.0f} kB of text"
            raise WrongFieldsError(("folder", f"{folder} has {size}. At least 100 kB are needed: add more files."))
        return found


def whole_path(named: str) -> Path:
    """The folder that a text names. Raises UsageError for a path that depends on where this process was started."""
    if not named.startswith(("~", "/", "\\")) and not Path(named).is_absolute():
        raise UsageError("Enter the whole path of a folder, from the top.")
    return expanded(named)
