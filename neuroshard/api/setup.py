"""The set-up wizard: a draft of the first settings in memory, its request and response bodies, and its routes.

Nothing is stored before the owner finishes. Only one event loop uses the draft."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field, JsonValue, SecretStr

from neuroshard.api.arrival import (
    LONGEST_PATH,
    ArrivalBody,
    ArrivalDraft,
    FolderListBody,
    FolderRequest,
    InvitationRequest,
    PurposeRequest,
    Room,
)
from neuroshard.api.presets import LineBody, PresetsBody, presets_body
from neuroshard.api.problems import WrongFieldsError
from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.api.requests import CommandBody, NoMembers, SettingName
from neuroshard.config.folders import expanded
from neuroshard.config.loading import LoadedSettings, check_settings, source_name
from neuroshard.config.saving import FirstSettings, stored_token
from neuroshard.config.setting_forms import advice_of
from neuroshard.config.settings import Settings, note_of
from neuroshard.errors import NotReadyError, StorageError, TokenError, UsageError
from neuroshard.identity import Wallet, new_phrase, parse_token
from neuroshard.identity.wallet import MAX_TOKEN_CHARACTERS
from neuroshard.runs.chosen_run import ChosenRun
from neuroshard.types import WalletId


class SetupWallet(ResponseBody):
    """The wallet that will be stored."""

    origin: Literal["created", "entered", "found"]
    wallet_id: str
    words: list[str] = Field(description="of a new wallet, until the owner has given some of them back; then empty")
    asked: list[int] = Field(description="places of the words to give back, from 1")
    confirmed: bool
    warning: EncodableText | None


class SetupFolder(ResponseBody):
    """The chosen data folder, with the space and the wallet in it."""

    path: EncodableText
    fixed_by: EncodableText | None = Field(description="the flag or variable that decides it, if one does")
    free_mb: int | None = Field(description="space on its disk, megabytes of 10^6 bytes; null: not known")
    wallet_id: EncodableText | None = Field(description="the wallet that this folder holds already")


class SetupField(ResponseBody):
    """One setting that the wizard asks for."""

    value: JsonValue = Field(description="null: the default, or what is measured")
    fixed_by: EncodableText | None = Field(description="the flag or variable that decides it, if one does")
    measured: JsonValue = Field(description="what null leads to on this computer; null: no limit")
    allowed: EncodableText


class SetupAutostart(ResponseBody):
    """Whether the node will start with the computer, and how."""

    possible: bool
    how: EncodableText = Field(description="what would be written where, or why it is not possible")
    wanted: bool


class SetupBody(ResponseBody):
    """Everything that the wizard shows."""

    wallet: SetupWallet | None
    folder: SetupFolder
    settings: dict[str, SetupField]
    autostart: SetupAutostart
    presets: PresetsBody
    gpus: list[EncodableText] = Field(description="GPUs that may train, with their memory; empty: the processor trains")
    arrival: ArrivalBody
    chosen: bool = Field(description="whether folder and settings were sent once")


class WalletRequest(RequestBody):
    """POST /api/setup/wallet: create a wallet, enter one, or use the one in the data folder."""

    source: Literal["create", "enter", "found"]
    phrase: str | None = Field(default=None, max_length=MAX_TOKEN_CHARACTERS)
    is_text: bool = Field(default=False, description="the phrase is meant to be neither words nor hex digits")


class BackupRequest(RequestBody):
    """POST /api/setup/backup: the requested words of the phrase, in order."""

    words: list[Annotated[str, Field(max_length=100)]] = Field(max_length=24)


class ChoicesRequest(RequestBody):
    """POST /api/setup/choices: the owner's choices; settings that are not named keep their values."""

    data_dir: str | None = Field(default=None, max_length=LONGEST_PATH)
    settings: dict[SettingName, JsonValue] = Field(default_factory=dict[str, JsonValue], max_length=64)
    autostart: bool | None = None


class FinishedBody(ResponseBody):
    """202: stored; the node starts."""

    message: EncodableText
    url: EncodableText = Field(description="where the dashboard will be")
    warning: EncodableText | None = Field(description="what did not work although the rest did")


ASKED_BACK = 3
SHORTEST_TEXT = 8
WalletOrigin = Literal["created", "entered", "found"]


@dataclass(frozen=True)
class DraftWallet:
    """The wallet of the draft. It is not stored on this computer yet, unless it was found in the data folder."""

    origin: WalletOrigin
    wallet_id: WalletId
    token: SecretStr
    asked: tuple[int, ...] = ()  # positions, from 1, of the words that the owner must repeat
    is_confirmed: bool = True
    warning: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words that the owner must write down; empty once the owner has repeated some of them."""
        return () if self.is_confirmed else tuple(self.token.get_secret_value().split())


def created_wallet() -> DraftWallet:
    """Create a wallet of twelve words, three of which the owner must repeat."""
    phrase = new_phrase(12)
    places = sorted(secrets.SystemRandom().sample(range(1, 13), ASKED_BACK))
    wallet = Wallet.from_secret(parse_token(phrase))
    return DraftWallet("created", wallet.wallet_id, SecretStr(phrase), tuple(places), is_confirmed=False)


def entered_wallet(text: str, *, is_text: bool, origin: WalletOrigin = "entered") -> DraftWallet:
    """The wallet of a phrase or key that the owner entered. Any other text needs `is_text`.

    Raises WrongFieldsError for the field `phrase`.
    """
    if not text.strip():
        raise WrongFieldsError(("phrase", "Enter the words of your wallet, or choose to make a new one."))
    try:
        secret = parse_token(text)
    except TokenError as error:
        raise WrongFieldsError(("phrase", f"{error.message} {error.action}".strip())) from None
    token = text.strip()
    if token.startswith("-"):
        raise WrongFieldsError(("phrase", "A token cannot begin with -: commands would read it as an option."))
    if secret.kind == "text" and not is_text:
        count = len(token.split())
        has = f"{count} word{'' if count == 1 else 's'}"
        raise WrongFieldsError(("phrase", f"A wallet phrase has 12 or 24 words; this text has {has}."))
    if secret.kind == "text" and origin == "entered" and len(token) < SHORTEST_TEXT:
        raise WrongFieldsError(
            ("phrase", f"A token has at least {SHORTEST_TEXT} characters: others could guess a shorter one.")
        )
    wallet = Wallet.from_secret(secret)
    return DraftWallet(origin, wallet.wallet_id, SecretStr(token), warning=secret.warning)


def confirmed_wallet(wallet: DraftWallet, answers: tuple[str, ...]) -> DraftWallet:
    """Confirm the wallet with the requested words. Raises WrongFieldsError with one entry per wrong word."""
    if wallet.is_confirmed:
        return wallet
    words = wallet.words
    given = (*answers, *[""] * len(wallet.asked))
    wrong = [
        (f"words.{index}", f"Word {place} is wrong." if answer.strip() else f"Word {place} is missing.")
        for index, (place, answer) in enumerate(zip(wallet.asked, given, strict=False))
        if answer.strip().lower() != words[place - 1]
    ]
    if wrong:
        raise WrongFieldsError(*wrong)
    return replace(wallet, is_confirmed=True)


PRESET_FIELDS = ("memory", "max_upload", "upload_percent", "cpu_percent", "pause_on_battery", "pause_on_full_screen")
FIELDS = (*PRESET_FIELDS, "cpu_threads", "max_storage", "monthly_quota", "training", "train_when")
PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class SetupFacts:
    """Facts about this computer. `measured` contains the effective values of settings that are not given."""

    measured: Mapping[str, JsonValue]
    line: LineBody
    gpus: Sequence[str]
    autostart_possible: bool
    autostart_how: str


@dataclass(frozen=True)
class Finished:
    """Result of storing the draft: the address of the dashboard, and a warning about a part that failed."""

    url: str
    warning: str | None = None


@dataclass(frozen=True)
class SetupChoices:
    """Everything that the owner chose."""

    first: FirstSettings
    starts_with_computer: bool = False
    run: ChosenRun | None = None  # to join; None: a run of this computer's own


Finish = Callable[[SetupChoices], Finished]
StartDemo = Callable[[], Finished]


@dataclass
class SetupDraft:
    """The draft of the first settings.

    Methods raise WrongFieldsError for values that the owner can correct, and then change nothing.
    """

    loaded: LoadedSettings
    surroundings: SetupFacts
    arrival: ArrivalDraft
    finish_with: Finish
    start_demo: StartDemo
    wallet: DraftWallet | None = None
    data_dir: Path = field(init=False)
    settings: dict[str, JsonValue] = field(init=False)
    clock: Callable[[], float] = time.monotonic  # seconds; may stand still while the computer sleeps
    autostart: bool = False
    is_chosen: bool = False
    seen_at: float = field(init=False)  # time of the last request of a page, by `clock`

    def __post_init__(self) -> None:
        self.seen_at = self.clock()
        self.data_dir = self.loaded.settings.data_dir
        given = self.loaded.sources
        self.settings = {key: _plain(getattr(self.loaded.settings, key)) for key in FIELDS if given[key] != "default"}

    def view(self) -> SetupBody:
        """The state of the draft as the page shows it. It also records that a page is open."""
        self.seen_at = self.clock()
        wallet = self.wallet
        shown = wallet and SetupWallet(
            origin=wallet.origin,
            wallet_id=wallet.wallet_id,
            words=list(wallet.words),
            asked=list(wallet.asked),
            confirmed=wallet.is_confirmed,
            warning=wallet.warning,
        )
        place = self.surroundings
        return SetupBody(
            wallet=shown,
            folder=SetupFolder(
                path=str(self.data_dir),
                fixed_by=self._fixed_by("data_dir"),
                free_mb=free_megabytes(self.data_dir),
                wallet_id=wallet_in(self.data_dir),
            ),
            settings={key: self._field(key) for key in FIELDS},
            presets=self._presets(),
            gpus=list(place.gpus),
            autostart=SetupAutostart(possible=place.autostart_possible, how=place.autostart_how, wanted=self.autostart),
            arrival=self.arrival.view(self._room()),
            chosen=self.is_chosen,
        )

    def choose_wallet(self, request: WalletRequest) -> None:
        """Create a wallet, or use the entered phrase or the wallet in the data folder."""
        match request.source:
            case "create":
                self.wallet = created_wallet()
            case "enter":
                self.wallet = entered_wallet(request.phrase or "", is_text=request.is_text)
            case "found":
                self.wallet = found_wallet(self.data_dir)

    def confirm(self, words: list[str]) -> None:
        """Compare the words that the owner repeats. Raises UsageError without a wallet."""
        if self.wallet is None:
            raise UsageError("There is no wallet yet.", "Make or enter one first.")
        self.wallet = confirmed_wallet(self.wallet, tuple(words))

    def choose(self, choices: ChoicesRequest) -> None:
        """Check the folder, the settings and autostart together, and keep them if all are valid."""
        wrong = [fault for key, value in choices.settings.items() if (fault := self._fault_of(key, value))]
        data_dir = self.data_dir
        if choices.data_dir is not None and self._fixed_by("data_dir") is None:
            try:
                data_dir = usable_folder(choices.data_dir)
            except (UsageError, StorageError) as error:
                wrong.append(("data_dir", f"{error.message} {error.action}".strip()))
        if choices.autostart and not self.surroundings.autostart_possible:
            wrong.append(("autostart", self.surroundings.autostart_how))
        if wrong:
            raise WrongFieldsError(*wrong)
        self.data_dir = data_dir
        self.settings |= choices.settings
        self.autostart = self.autostart if choices.autostart is None else choices.autostart
        self.is_chosen = True

    def finish(self) -> Finished:
        """Store everything. Raises UsageError without a confirmed wallet, and NeuroShardError if storing fails."""
        wallet = self.wallet
        if wallet is None or not wallet.is_confirmed:
            raise UsageError("No wallet is backed up yet.", "Go back to the first step.")
        found = wallet_in(self.data_dir)
        if found is not None and found != wallet.wallet_id:
            raise WrongFieldsError(
                ("data_dir", f"This folder holds the wallet {found} already. Use that one, or another folder.")
            )
        if self.arrival.purpose is None:
            raise UsageError("You have not yet chosen what this computer does.", "Go back to the first step.")
        chosen = {key: value for key, value in self.settings.items() if self._fixed_by(key) is None}
        if self.arrival.purpose == "text" and self.arrival.text is not None:
            chosen["text"] = str(self.arrival.text.path)
        first = FirstSettings(self.data_dir, wallet.token, chosen)
        try:
            return self.finish_with(SetupChoices(first, self.autostart, self.arrival.chosen_run()))
        except StorageError as error:
            raise WrongFieldsError(("data_dir", f"{error.message} {error.action}".strip())) from error

    def _room(self) -> Room:
        """The limits so far: those chosen, otherwise those measured."""
        fields = {key: self._field(key) for key in ("memory", "max_upload", "upload_percent", "monthly_quota")}
        values = {key: one.measured if one.value is None else one.value for key, one in fields.items()}
        return Room.of(values, self.surroundings.line.upload)

    def _presets(self) -> PresetsBody:
        """The presets, and the chosen one: the balanced one before the owner has chosen any limit."""
        memory, values = self.surroundings.measured.get("memory"), dict[str, JsonValue]()
        for key in (*PRESET_FIELDS, "monthly_quota"):
            chosen = self._field(key).value
            values[key] = _plain(Settings.model_fields[key].default) if chosen is None else chosen
        body = presets_body(int(memory) if isinstance(memory, int) else 0, self.surroundings.line, values)
        return body if self.settings or self.is_chosen else body.model_copy(update={"chosen": "balanced"})

    def is_abandoned(self) -> bool:
        """Whether no page sent a request for PATIENCE_SECONDS. An open page sends requests all the time."""
        return self.clock() - self.seen_at > PATIENCE_SECONDS

    def _field(self, key: str) -> SetupField:
        fixed = self._fixed_by(key)
        value = _plain(getattr(self.loaded.settings, key)) if fixed else self.settings.get(key)
        return SetupField(
            value=value,
            fixed_by=fixed,
            measured=self.surroundings.measured.get(key, _plain(Settings.model_fields[key].default)),
            allowed=note_of(key).allowed,
        )

    def _fixed_by(self, key: str) -> str | None:
        source = self.loaded.sources[key]
        return source_name(source, key) if source in {"flag", "environment"} else None

    def _fault_of(self, key: str, value: JsonValue) -> tuple[str, str] | None:
        if key not in FIELDS:
            return (key, f"{key} cannot be set here.")
        if value is None or self._fixed_by(key) is not None:
            return None
        try:
            check_settings({key: value}, {key: "default"})
        except UsageError:
            return (key, advice_of(key))
        return None


def usable_folder(text: str) -> Path:
    """Check an entered folder; nothing is created. Raises UsageError, or StorageError if it cannot be written."""
    named = text.strip()
    folder = expanded(named)
    if not named or not folder.is_absolute():
        raise UsageError("The folder must be an absolute path, like the proposed one.")
    there = existing_part(folder)
    if not there.is_dir():
        raise StorageError(f"{there} is a file, not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{there} is not writable.", "Choose a folder that you own.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise UsageError(f"{folder} contains other files.", "Choose an empty folder, or a new folder inside this one.")
    return folder


def existing_part(folder: Path) -> Path:
    """The folder itself, or its nearest existing parent. Raises StorageError if it cannot be accessed."""
    try:
        return next(place for place in (folder, *folder.parents) if place.exists())
    except (OSError, StopIteration) as error:
        raise StorageError(f"{folder} cannot be read.", "Choose another folder.") from error


def free_megabytes(folder: Path) -> int | None:
    """Free space on the disk of a folder, which need not exist, in megabytes of 10^6 bytes; None if not known."""
    try:
        return shutil.disk_usage(existing_part(folder)).free // 1_000_000
    except (OSError, StorageError):
        return None


def wallet_in(folder: Path) -> str | None:
    """Id of the wallet that an earlier set-up stored in a folder; None without a usable one."""
    try:
        return found_wallet(folder).wallet_id
    except WrongFieldsError:
        return None


def found_wallet(folder: Path) -> DraftWallet:
    """The wallet that an earlier set-up stored in a folder. Raises WrongFieldsError for the field `data_dir`."""
    try:
        token = stored_token(folder)
        if token is None:
            raise WrongFieldsError(("data_dir", f"{folder} holds no wallet."))
        return entered_wallet(token.get_secret_value(), is_text=True, origin="found")
    except TokenError as error:
        raise WrongFieldsError(("data_dir", error.message)) from error


def _plain(value: object) -> JsonValue:
    """A setting's value as JSON. No setting of the wizard is a list."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.toml", "keys", "instance.lock", "checkpoints"))


ANSWERED = ["GET", "POST", "PATCH"]  # methods of a node's routes
WAITING = "This node is waiting to be set up in the browser."


def arrival_routes(desk: SetupDraft, clock: Callable[[], float]) -> APIRouter:
    """Make the routes of the wizard's first question. `clock` gives seconds since the epoch."""
    router = APIRouter(tags=["setup"])

    @router.post("/api/setup/invitation")
    async def read_invitation(body: InvitationRequest) -> SetupBody:
        """Read an invitation and show it. Nothing is joined, downloaded or dialled."""
        desk.arrival.read(body.text, clock())
        return desk.view()

    @router.post("/api/setup/purpose")
    async def choose_purpose(body: PurposeRequest) -> SetupBody:
        """Answer the first question: join the run of the invitation or one nearby, or train on the text in a folder."""
        desk.arrival.choose(body)
        return desk.view()

    @router.post("/api/setup/folders")
    async def list_folder(body: FolderRequest) -> FolderListBody:
        """List the folders in a folder of this computer, and how much text they contain."""
        return await to_thread.run_sync(desk.arrival.list_folder, body.path)  # a sleeping disk takes seconds

    @router.post("/api/setup/demo", status_code=202)
    async def start_demo(body: NoMembers | None = None) -> FinishedBody:
        """Start the demo in this process. Nothing is stored about this computer's owner."""
        del body
        done = desk.start_demo()
        return FinishedBody(message="The demo starts.", url=done.url, warning=done.warning)

    @router.post("/api/link", status_code=202)
    async def open_link(body: InvitationRequest) -> CommandBody:
        """Show a link that was opened on this computer. Nothing is joined, downloaded or dialled."""
        desk.arrival.open_link(body.text, clock())
        return CommandBody(state="setup", message="The wizard shows the invitation.")

    return router


def setup_routes(desk: SetupDraft, stop: Callable[[str], object], clock: Callable[[], float] = time.time) -> APIRouter:
    """Make the wizard's routes, and the two routes that commands for a running node use: shutdown and health."""
    router = arrival_routes(desk, clock)

    @router.get("/api/setup")
    async def read_setup() -> SetupBody:
        """Choices so far and possible values; the words of a new wallet until some were repeated."""
        return desk.view()

    @router.post("/api/setup/wallet")
    async def choose_wallet(body: WalletRequest) -> SetupBody:
        """Create a wallet, enter one, or use the one in the data folder. It is not stored yet."""
        desk.choose_wallet(body)
        return desk.view()

    @router.post("/api/setup/backup")
    async def confirm_backup(body: BackupRequest) -> SetupBody:
        """Repeat some words of the new wallet, to confirm that they were written down."""
        desk.confirm(body.words)
        return desk.view()

    @router.post("/api/setup/choices")
    async def choose(body: ChoicesRequest) -> SetupBody:
        """Choose data folder, limits and training times. Nothing is stored yet; `errors` lists wrong fields."""
        desk.choose(body)
        return desk.view()

    @router.post("/api/setup/finish", status_code=202)
    async def finish(body: NoMembers | None = None) -> FinishedBody:
        """Store the token (mode 0600) and the settings, and start the node in this process."""
        del body
        done = desk.finish()
        return FinishedBody(message="The node starts.", url=done.url, warning=done.warning)

    @router.post("/api/shutdown", status_code=202)
    async def shut_down(body: NoMembers | None = None) -> CommandBody:
        """Stop without storing anything."""
        del body
        stop("asked through the API")
        return CommandBody(state="stopping", message="The node is stopping. Nothing was stored.")

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Check that the process answers."""
        return {"status": "setup"}

    @router.api_route("/v1/{rest:path}", methods=ANSWERED, include_in_schema=False)
    @router.api_route("/api/{rest:path}", methods=ANSWERED, include_in_schema=False)
    async def other(rest: str) -> None:
        """Refuse the other routes of a node with 503."""
        del rest
        raise NotReadyError(WAITING, "Finish the setup in its page: `neuroshard` opens it again.")

    return router
