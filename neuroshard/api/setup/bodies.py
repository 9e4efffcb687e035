"""Bodies of the wizard's routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from neuroshard.api.bodies.actions import SettingName
from neuroshard.api.bodies.base import Answer, Question, Text
from neuroshard.identity.token import MAX_TOKEN_CHARACTERS

LONGEST_PATH = 4096


class SetupWallet(Answer):
    """The wallet that will be stored."""

    origin: Literal["created", "entered", "found"]
    wallet_id: str
    words: list[str] = Field(description="of a new wallet, until the owner has given some of them back; then empty")
    asked: list[int] = Field(description="places of the words to give back, from 1")
    confirmed: bool
    warning: Text | None


class SetupFolder(Answer):
    """The data folder."""

    path: Text
    fixed_by: Text | None = Field(description="the flag or variable that decides it, if one does")
    free_mb: int | None = Field(description="space on its disk, megabytes of 10^6 bytes; null: not known")
    wallet_id: Text | None = Field(description="the wallet that this folder holds already")


class SetupField(Answer):
    """One setting."""

    value: JsonValue = Field(description="null: the default, or what is measured")
    fixed_by: Text | None = Field(description="the flag or variable that decides it, if one does")
    measured: JsonValue = Field(description="what null leads to on this computer; null: no limit")
    allowed: Text


class SetupAutostart(Answer):
    """Starting with the computer."""

    possible: bool
    how: Text = Field(description="what would be written where, or why it is not possible")
    wanted: bool


class SetupBody(Answer):
    """Everything that the wizard shows."""

    wallet: SetupWallet | None
    folder: SetupFolder
    settings: dict[str, SetupField]
    autostart: SetupAutostart
    chosen: bool = Field(description="whether folder and settings were sent once")


class WalletRequest(Question):
    """POST /api/setup/wallet: make one, enter one, or take the one that the data folder holds."""

    source: Literal["create", "enter", "found"]
    phrase: str | None = Field(default=None, max_length=MAX_TOKEN_CHARACTERS)
    is_text: bool = Field(default=False, description="the phrase is meant to be neither words nor hex digits")


class BackupRequest(Question):
    """POST /api/setup/backup: the asked words, in order."""

    words: list[Annotated[str, Field(max_length=100)]] = Field(max_length=24)


class ChoicesRequest(Question):
    """POST /api/setup/choices: what the owner chose; settings that are not named stay as they are."""

    data_dir: str | None = Field(default=None, max_length=LONGEST_PATH)
    settings: dict[SettingName, JsonValue] = Field(default_factory=dict[str, JsonValue], max_length=64)
    autostart: bool | None = None


class FinishedBody(Answer):
    """202: stored; the node starts."""

    message: Text
    url: Text = Field(description="where the dashboard will be")
    warning: Text | None = Field(description="what did not work although the rest did")
