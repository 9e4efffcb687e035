"""What the wizard knows so far, in memory only: nothing is stored before the end. Used by one event loop only."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from neuroshard.api.problems import WrongFieldsError
from neuroshard.api.setup.bodies import (
    ChoicesRequest,
    SetupAutostart,
    SetupBody,
    SetupField,
    SetupFolder,
    SetupWallet,
    WalletRequest,
)
from neuroshard.api.setup.draft import DraftWallet, confirmed_wallet, created_wallet, entered_wallet
from neuroshard.config.data_dir import expanded
from neuroshard.config.first_settings import FirstSettings, stored_token
from neuroshard.config.loading import LoadedSettings, check_settings, source_name
from neuroshard.config.settings import Settings, note_of
from neuroshard.errors import StorageError, TokenError, UsageError

FIELDS = ("memory", "cpu_threads", "max_storage", "max_upload", "monthly_quota", "training", "train_when")
PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class Surroundings:
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
class SetupDesk:
    """The draft of a first run. Calls raise WrongFieldsError for what the owner can mend, and change nothing then."""

    loaded: LoadedSettings
    surroundings: Surroundings
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
