"""The set-up wizard: a draft of the first run, kept in memory only, its bodies and its routes.

Nothing is stored before the owner finishes. One event loop uses the draft."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field, JsonValue, SecretStr

from neuroshard.api.problems import WrongFieldsError
from neuroshard.api.rendering import RequestBody, ResponseBody, Text
from neuroshard.api.requests import CommandBody, NoMembers, SettingName
from neuroshard.config.folders import expanded
from neuroshard.config.loading import LoadedSettings, check_settings, source_name
from neuroshard.config.saving import FirstSettings, stored_token
from neuroshard.config.settings import Settings, note_of
from neuroshard.errors import NotReadyError, StorageError, TokenError, UsageError
from neuroshard.identity import Wallet, new_phrase, parse_token
from neuroshard.identity.wallet import MAX_TOKEN_CHARACTERS
from neuroshard.types import WalletId

LONGEST_PATH = 4096


class SetupWallet(ResponseBody):
    """The wallet that will be stored."""

    origin: Literal["created", "entered", "found"]
    wallet_id: str
    words: list[str] = Field(description="of a new wallet, until the owner has given some of them back; then empty")
    asked: list[int] = Field(description="places of the words to give back, from 1")
    confirmed: bool
    warning: Text | None


class SetupFolder(ResponseBody):
    """The data folder."""

    path: Text
    fixed_by: Text | None = Field(description="the flag or variable that decides it, if one does")
    free_mb: int | None = Field(description="space on its disk, megabytes of 10^6 bytes; null: not known")
    wallet_id: Text | None = Field(description="the wallet that this folder holds already")


class SetupField(ResponseBody):
    """One setting."""

    value: JsonValue = Field(description="null: the default, or what is measured")
    fixed_by: Text | None = Field(description="the flag or variable that decides it, if one does")
    measured: JsonValue = Field(description="what null leads to on this computer; null: no limit")
    allowed: Text


class SetupAutostart(ResponseBody):
    """Starting with the computer."""

    possible: bool
    how: Text = Field(description="what would be written where, or why it is not possible")
    wanted: bool


class SetupBody(ResponseBody):
    """Everything that the wizard shows."""

    wallet: SetupWallet | None
    folder: SetupFolder
    settings: dict[str, SetupField]
    autostart: SetupAutostart
    chosen: bool = Field(description="whether folder and settings were sent once")


class WalletRequest(RequestBody):
    """POST /api/setup/wallet: make one, enter one, or take the one that the data folder holds."""

    source: Literal["create", "enter", "found"]
    phrase: str | None = Field(default=None, max_length=MAX_TOKEN_CHARACTERS)
    is_text: bool = Field(default=False, description="the phrase is meant to be neither words nor hex digits")


class BackupRequest(RequestBody):
    """POST /api/setup/backup: the asked words, in order."""

    words: list[Annotated[str, Field(max_length=100)]] = Field(max_length=24)


class ChoicesRequest(RequestBody):
    """POST /api/setup/choices: what the owner chose; settings that are not named stay as they are."""

    data_dir: str | None = Field(default=None, max_length=LONGEST_PATH)
    settings: dict[SettingName, JsonValue] = Field(default_factory=dict[str, JsonValue], max_length=64)
    autostart: bool | None = None


class FinishedBody(ResponseBody):
    """202: stored; the node starts."""

    message: Text
    url: Text = Field(description="where the dashboard will be")
    warning: Text | None = Field(description="what did not work although the rest did")


ASKED_BACK = 3
SHORTEST_TEXT = 8
WalletOrigin = Literal["created", "entered", "found"]


@dataclass(frozen=True)
class DraftWallet:
    """A wallet that nothing on this computer stores yet, unless it was found here."""

    origin: WalletOrigin
    wallet_id: WalletId
    token: SecretStr
    asked: tuple[int, ...] = ()  # places of the words that the owner must give back, from 1
    is_confirmed: bool = True
    warning: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What the owner must write down now; nothing once that was proved."""
        return () if self.is_confirmed else tuple(self.token.get_secret_value().split())


def created_wallet() -> DraftWallet:
    """A new wallet of twelve words, three of which will be asked back."""
    phrase = new_phrase(12)
    places = sorted(secrets.SystemRandom().sample(range(1, 13), ASKED_BACK))
    wallet = Wallet.from_secret(parse_token(phrase))
    return DraftWallet("created", wallet.wallet_id, SecretStr(phrase), tuple(places), is_confirmed=False)


def entered_wallet(text: str, *, is_text: bool, origin: WalletOrigin = "entered") -> DraftWallet:
    """The wallet of a phrase or key that the owner has typed; another text only when that is said to be meant.

    Raises WrongFieldsError for the field `phrase`.
    """
    try:
        secret = parse_token(text)
    except TokenError as error:
        raise WrongFieldsError(("phrase", f"{error.message} {error.action}".strip())) from None
    token = text.strip()
    if secret.kind == "text" and not is_text:
        count = len(token.split())
        has = f"{count} word{'' if count == 1 else 's'}"
        raise WrongFieldsError(("phrase", f"A wallet phrase has 12 or 24 words; this text has {has}."))
    if secret.kind == "text" and origin == "entered" and len(token) < SHORTEST_TEXT:
        raise WrongFieldsError(("phrase", f"A token has at least {SHORTEST_TEXT} characters: others would guess it."))
    wallet = Wallet.from_secret(secret)
    return DraftWallet(origin, wallet.wallet_id, SecretStr(token), warning=secret.warning)


def confirmed_wallet(wallet: DraftWallet, answers: tuple[str, ...]) -> DraftWallet:
    """The wallet once its owner gave the asked words back. Raises WrongFieldsError, one entry for each wrong word."""
    if wallet.is_confirmed:
        return wallet
    words = wallet.words
    given = (*answers, *[""] * len(wallet.asked))
    wrong = [
        (f"words.{index}", f"Word {place} is another one." if answer.strip() else f"Word {place} is missing.")
        for index, (place, answer) in enumerate(zip(wallet.asked, given, strict=False))
        if answer.strip().lower() != words[place - 1]
    ]
    if wrong:
        raise WrongFieldsError(*wrong)
    return replace(wallet, is_confirmed=True)


FIELDS = ("memory", "cpu_threads", "max_storage", "max_upload", "monthly_quota", "training", "train_when")
PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class SetupFacts:
    """What is known of the computer. `measured` is what a setting that is not given leads to here."""

    measured: Mapping[str, JsonValue]
    autostart_possible: bool
    autostart_how: str


@dataclass(frozen=True)
class Finished:
    """How storing went."""

    url: str
    warning: str | None = None


Finish = Callable[[FirstSettings, bool], Finished]  # the choices and whether to start with the computer


@dataclass
class SetupDraft:
    """The draft of a first run. Calls raise WrongFieldsError for what the owner can mend, and change nothing then."""

    loaded: LoadedSettings
    surroundings: SetupFacts
    finish_with: Finish
    wallet: DraftWallet | None = None
    data_dir: Path = field(init=False)
    settings: dict[str, JsonValue] = field(init=False)
    clock: Callable[[], float] = time.monotonic  # seconds, standing still while the computer sleeps
    autostart: bool = False
    is_chosen: bool = False
    seen_at: float = field(init=False)  # when a page has last asked for anything

    def __post_init__(self) -> None:
        self.seen_at = self.clock()
        self.data_dir = self.loaded.settings.data_dir
        given = self.loaded.sources
        self.settings = {key: _plain(getattr(self.loaded.settings, key)) for key in FIELDS if given[key] != "default"}

    def view(self) -> SetupBody:
        """What the page shows."""
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
            autostart=SetupAutostart(possible=place.autostart_possible, how=place.autostart_how, wanted=self.autostart),
            chosen=self.is_chosen,
        )

    def choose_wallet(self, wish: WalletRequest) -> None:
        """Make a wallet, take the phrase that was typed, or the one in the data folder."""
        match wish.source:
            case "create":
                self.wallet = created_wallet()
            case "enter":
                self.wallet = entered_wallet(wish.phrase or "", is_text=wish.is_text)
            case "found":
                self.wallet = found_wallet(self.data_dir)

    def confirm(self, words: list[str]) -> None:
        """Compare the words that the owner gives back."""
        if self.wallet is None:
            raise UsageError("There is no wallet yet.", "Make or enter one first.")
        self.wallet = confirmed_wallet(self.wallet, tuple(words))

    def choose(self, choices: ChoicesRequest) -> None:
        """Check folder and settings and remember them."""
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
        """Store everything. Raises NeuroShardError when that fails."""
        wallet = self.wallet
        if wallet is None or not wallet.is_confirmed:
            raise UsageError("There is no wallet that was backed up yet.", "Go back to the first step.")
        found = wallet_in(self.data_dir)
        if found is not None and found != wallet.wallet_id:
            raise WrongFieldsError(
                ("data_dir", f"This folder holds the wallet {found} already. Use that one, or another folder.")
            )
        chosen = {key: value for key, value in self.settings.items() if self._fixed_by(key) is None}
        try:
            return self.finish_with(FirstSettings(self.data_dir, wallet.token, chosen), self.autostart)
        except StorageError as error:
            raise WrongFieldsError(("data_dir", f"{error.message} {error.action}".strip())) from error

    def is_abandoned(self) -> bool:
        """Whether no page has asked for so long that nobody will come back to it; an open one asks all the time."""
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
            return (key, f"{key} is not asked here.")
        if value is None or self._fixed_by(key) is not None:
            return None
        try:
            check_settings({key: value}, {key: "default"})
        except UsageError:
            return (key, f"Allowed is {note_of(key).allowed}.")
        return None


def usable_folder(text: str) -> Path:
    """The folder that was typed. Raises UsageError, StorageError when nothing could be written there; makes nothing."""
    named = text.strip()
    folder = expanded(named)
    if not named or not folder.is_absolute():
        raise UsageError("A folder is named from the top, such as the one that is proposed.")
    there = existing_part(folder)
    if not there.is_dir():
        raise StorageError(f"{there} is a file, not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"Nothing can be written into {there}.", "Choose a folder of yours.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise UsageError(f"{folder} holds other things.", "Choose an empty folder, or a new one in it.")
    return folder


def existing_part(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there. Raises StorageError when nobody may look."""
    try:
        return next(place for place in (folder, *folder.parents) if place.exists())
    except (OSError, StopIteration) as error:
        raise StorageError(f"{folder} cannot be looked at.", "Choose another folder.") from error


def free_megabytes(folder: Path) -> int | None:
    """Space on the disk of a folder that need not be there yet; None when nobody can tell."""
    try:
        return shutil.disk_usage(existing_part(folder)).free // 1_000_000
    except (OSError, StorageError):
        return None


def wallet_in(folder: Path) -> str | None:
    """The id of the wallet that a first run left in a folder; None without a usable one."""
    try:
        return found_wallet(folder).wallet_id
    except WrongFieldsError:
        return None


def found_wallet(folder: Path) -> DraftWallet:
    """The wallet that a first run left in a folder. Raises WrongFieldsError for the field `data_dir`."""
    try:
        token = stored_token(folder)
        if token is None:
            raise WrongFieldsError(("data_dir", f"{folder} holds no wallet."))
        return entered_wallet(token.get_secret_value(), is_text=True, origin="found")
    except TokenError as error:
        raise WrongFieldsError(("data_dir", error.message)) from error


def _plain(value: object) -> JsonValue:
    """The value of a setting that the wizard asks for: none of them is a list."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.toml", "keys", "instance.lock", "checkpoints"))


ANSWERED = ["GET", "POST", "PATCH"]  # methods of a node's routes
WAITING = "This node waits to be set up in the browser."


def setup_routes(desk: SetupDraft, stop: Callable[[str], object]) -> APIRouter:
    """The wizard's own routes, and the two that commands for a running node ask for."""
    router = APIRouter(tags=["setup"])

    @router.get("/api/setup")
    async def read_setup() -> SetupBody:
        """What was chosen so far and what can be; a new wallet's words as long as they were not given back."""
        return desk.view()

    @router.post("/api/setup/wallet")
    async def choose_wallet(body: WalletRequest) -> SetupBody:
        """Make a wallet, enter one, or take the one of the data folder. Stored nowhere yet."""
        desk.choose_wallet(body)
        return desk.view()

    @router.post("/api/setup/backup")
    async def confirm_backup(body: BackupRequest) -> SetupBody:
        """Prove that the words were written down."""
        desk.confirm(body.words)
        return desk.view()

    @router.post("/api/setup/choices")
    async def choose(body: ChoicesRequest) -> SetupBody:
        """Choose data folder, limits and when to work. Stored nowhere yet; `errors` of a problem names the fields."""
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
        """End without storing anything."""
        del body
        stop("asked through the API")
        return CommandBody(state="stopping", message="The node is stopping. Nothing was stored.")

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "setup"}

    @router.api_route("/v1/{rest:path}", methods=ANSWERED, include_in_schema=False)
    @router.api_route("/api/{rest:path}", methods=ANSWERED, include_in_schema=False)
    async def other(rest: str) -> None:
        """Whatever a node would answer."""
        del rest
        raise NotReadyError(WAITING, "Finish in its page: `neuroshard` opens it again.")

    return router
