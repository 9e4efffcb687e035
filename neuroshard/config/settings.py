"""Settings that the owner of this computer decides. One class declares every name, default, limit and explanation.

Plain pydantic instead of pydantic-settings: the environment is an argument here, while BaseSettings reads os.environ,
and every value must keep its source. Only the merge of four mappings remains, and the import is 0.25 s faster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from neuroshard.config.folders import NodePaths, expanded
from neuroshard.config.multiaddr import MULTIADDR_FORM, checked_multiaddr
from neuroshard.config.weekly_schedule import SCHEDULE_FORM, checked_spans
from neuroshard.errors import UsageError
from neuroshard.types import BITS_PER_BYTE, LOOPBACK

VAST = 1_000_000_000
"""Upper bound of limits that have no other: more than any computer has, and small enough for every calculation."""


OptimizerMemory = Literal["auto", "device", "host"]
"""Where an accelerator's optimizer keeps its moments; "auto": on the host only if they do not fit the device."""


class Applies(StrEnum):
    """Time at which a change of a stored setting takes effect."""

    AT_ONCE = "at once"
    AFTER_RESTART = "after a restart"
    NOT_STORED = "only as a flag, as an environment variable, or in the config.toml of the default data folder"


@dataclass(frozen=True)
class SettingNote:
    """Explanation of a setting for users: the allowed values, when a stored change takes effect, and who changes it."""

    allowed: str
    applies: Applies = Applies.AFTER_RESTART
    owner: str = ""  # how the owner alone changes it, outside the dashboard and the API; empty: these change it too


def _as_number(value: Any) -> Any:
    """Reject a bool, which Python accepts as 0 or 1, and underscores in digits: `true` or 1_0 is a mistake."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise ValueError("a number is needed")
    return value


def _known_source(value: str | None) -> str | None:
    if value is None:
        return None
    scheme, separator, rest = value.partition("://")
    if "\0" in value:
        raise ValueError("a NUL character")
    urlsplit(value)  # raises ValueError for a text that is not an address
    if not value or (separator and (scheme not in {"https", "http", "file"} or not rest)):
        raise ValueError("not a folder or an address")
    return value


def _bare_host(value: str) -> str:
    if not value or any(character in value for character in "/ @") or value.startswith("["):
        raise ValueError("not a host")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:(0|[1-9]\d{0,2}))?", value):
        raise ValueError("not a device")
    return value


def _site(value: str) -> str:
    if not re.fullmatch(r"auto|off|[1-9]\d{0,2}", value):
        raise ValueError("not a number of processes")
    return value


def _organiser(value: str) -> str:
    parts = urlsplit(value.strip())
    host, _ = parts.hostname or "", parts.port  # raises ValueError for a port that is not a number
    is_plain = not parts.query and not parts.fragment and parts.username is None
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and host in {"localhost", "127.0.0.1", "::1"})
    if not host or not is_plain or not is_safe:
        raise ValueError("not an https:// address")
    return value.strip().rstrip("/")


def _public_name(value: str | None) -> str | None:
    text = "" if value is None else value.strip()
    if len(text) > 32 or not text.isprintable():
        raise ValueError(f"it has {len(text)} characters" if len(text) > 32 else "it is not printable text")
    return text or None


def _own_address(value: str) -> str:
    ip_address(value)  # raises ValueError for a text that is not an IP address
    return value


def _listed(value: Any) -> Any:
    """Split a text at its commas: the environment and the dashboard have no lists."""
    return tuple(part for part in map(str.strip, value.split(",")) if part) if isinstance(value, str) else value


def _node_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(checked_multiaddr, value)))


def _program_names(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not name or "/" in name or "\\" in name:
            raise ValueError(f'"{name[:40]}" is not the bare name of a program')
    return tuple(dict.fromkeys(value))


def _run_id(value: str) -> str:
    text = value.strip().lower()
    if not re.fullmatch("[0-9a-f]{64}", text):
        count = "1 character" if len(text) == 1 else f"{len(text)} characters"
        raise ValueError(f"it has {count}" if len(text) != 64 else "it has other characters")
    return text


def _expanded(value: Path) -> Path:
    try:
        return expanded(value)
    except UsageError as error:
        raise ValueError(error.message) from error


Whole = Annotated[int, BeforeValidator(_as_number)]
Real = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
Folder = Annotated[Path, AfterValidator(_expanded)]
Addresses = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_node_addresses)]
Spans = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(checked_spans), Field(max_length=64)]
Programs = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_program_names), Field(max_length=64)]
_YES_NO = "true or false"
IN_FILE = "a line in config.toml"


class Settings(BaseModel):
    """All settings of a node, checked and frozen. Megabytes are 10**6 bytes, gigabytes 10**9."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    token: Annotated[SecretStr | None, SettingNote("a phrase of 12 or 24 words, 64 hex digits, or any text")] = None
    token_file: Annotated[
        Folder | None, SettingNote("a file with the token", owner="`neuroshard --token-file FILE`")
    ] = None
    host: Annotated[
        str,
        AfterValidator(_bare_host),
        SettingNote("a host name or address without port", owner="`neuroshard --host HOST`"),
    ] = LOOPBACK
    port: Annotated[Whole, Field(ge=0, le=65_535), SettingNote("0 to 65535; 0 takes any free port")] = 8000
    data_dir: Annotated[
        Folder,
        SettingNote("a folder that this user can write to", Applies.NOT_STORED, owner="`neuroshard --data-dir FOLDER`"),
    ] = Path()
    genesis: Annotated[
        str | None,
        AfterValidator(_known_source),
        SettingNote(
            "a folder, or an address that starts with https://, http:// or file://; unset: the nodes of the run",
            owner="`neuroshard --genesis PLACE`",
        ),
    ] = None
    text: Annotated[
        Folder | None,
        SettingNote("a folder with your own text files; unset: none", owner="`neuroshard --text FOLDER`"),
    ] = None
    device: Annotated[
        str, AfterValidator(_device), SettingNote("auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, where N counts from 0")
    ] = "auto"
    compile: Annotated[
        Literal["auto", "off"], SettingNote("auto or off; auto: CUDA and XPU devices, where it is correct and faster")
    ] = "auto"
    optimizer_memory: Annotated[
        OptimizerMemory,
        SettingNote("auto, device or host; auto: in the host's memory if the GPU's is too small for the optimizer"),
    ] = "auto"
    max_gpu_memory: Annotated[
        Whole | None, Field(ge=1000, le=VAST), SettingNote(f"megabytes of the GPU, 1000 to {VAST}; unset: nine tenths")
    ] = None
    site: Annotated[
        str,
        AfterValidator(_site),
        SettingNote("auto, off, or 1 to 999: the number of processes that compute, each on a device; auto: all GPUs"),
    ] = "off"
    site_mode: Annotated[
        Literal["auto", "replicate", "shard"],
        SettingNote("auto, replicate or shard: every process has all weights of this node's layers, or a part of them"),
    ] = "auto"
    site_timeout: Annotated[
        Real, Field(ge=1, le=3600), SettingNote("1 to 3600 seconds until a silent process of a site counts as failed")
    ] = 60.0
    memory: Annotated[Whole | None, Field(ge=1, le=VAST), SettingNote(f"megabytes, 1 to {VAST}; unset: measured")] = (
        None
    )
    cpu_threads: Annotated[Whole | None, Field(ge=1, le=1024), SettingNote("1 to 1024; unset: measured")] = None
    max_storage: Annotated[
        Whole,
        Field(ge=20, le=VAST),
        SettingNote(f"megabytes of shards and their descriptions, 20 to {VAST}", Applies.AT_ONCE),
    ] = 2000
    max_checkpoint_storage: Annotated[
        Whole,
        Field(ge=1, le=VAST),
        SettingNote(f"megabytes of all checkpoints and copies, 1 to {VAST}", Applies.AT_ONCE),
    ] = 50_000
    checkpoint_min_seconds: Annotated[
        Real, Field(ge=0, le=86_400), SettingNote("seconds between checkpoints, 0 to 86400", Applies.AT_ONCE)
    ] = 30.0
    checkpoint_write_gb_per_day: Annotated[
        Real, Field(ge=0.001, le=VAST), SettingNote(f"gigabytes per day, 0.001 to {VAST}", Applies.AT_ONCE)
    ] = 200.0
    archive: Annotated[
        bool, SettingNote("true or false; whether to keep a checkpoint for ever at regular outer steps of a run")
    ] = False
    archive_every: Annotated[
        Whole, Field(ge=1, le=VAST), SettingNote(f"outer steps between two archived checkpoints, 1 to {VAST}")
    ] = 50
    inner_steps: Annotated[
        Whole | None, Field(ge=1, le=1_000_000), SettingNote("1 to 1000000; only for a run of your own; unset: 100")
    ] = None
    max_stages: Annotated[
        Whole | None, Field(ge=1, le=4096), SettingNote("1 to 4096 stages of a run; unset: as many as fit the memory")
    ] = None
    spare_stages: Annotated[
        Whole, Field(ge=0, le=4096), SettingNote("0 to 4096 stages beyond max_stages, held while nobody else does")
    ] = 0
    run: Annotated[
        Annotated[str, AfterValidator(_run_id)] | None,
        SettingNote("the 64 hex digits of a run's id; unset: the default run", owner="`neuroshard --run RUN_ID`"),
    ] = None
    invite: Annotated[
        SecretStr | None, SettingNote("an invitation: its code, its link, or the path of its file", Applies.NOT_STORED)
    ] = None
    organiser: Annotated[
        Annotated[str, AfterValidator(_organiser)] | None,
        SettingNote(
            "the https:// address of an organiser, or http:// on this computer; unset: the last one",
            owner="`neuroshard --organiser URL`",
        ),
    ] = None
    public_name: Annotated[
        str | None,
        AfterValidator(_public_name),
        SettingNote("at most 32 printable characters; unset: the run's page shows no name"),
    ] = None
    peer: Annotated[
        Addresses,
        Field(max_length=64),
        SettingNote(f"at most 64 addresses like {MULTIADDR_FORM}", owner="`neuroshard --peer MULTIADDR`"),
    ] = ()
    p2p_port: Annotated[Whole, Field(ge=0, le=65_535), SettingNote("0 to 65535; 0 takes a free port and keeps it")] = 0
    p2p_host: Annotated[
        str,
        AfterValidator(_own_address),
        SettingNote("an IP address of this computer; a loopback address also turns LAN discovery and port mapping off"),
    ] = "0.0.0.0"  # noqa: S104 - other nodes must reach this one
    max_upload: Annotated[
        Real | None,
        Field(gt=0, le=VAST),
        SettingNote(
            f"megabits per second to other nodes, more than 0, at most {VAST}; unset: no limit", Applies.AT_ONCE
        ),
    ] = None
    upload_percent: Annotated[
        Whole,
        Field(ge=1, le=100),
        SettingNote("1 to 100, the percentage of the line's measured upload speed; 100: no limit", Applies.AT_ONCE),
    ] = 100
    network: Annotated[bool, SettingNote("true or false; false: this node does not connect to others")] = True
    lan_discovery: Annotated[bool, SettingNote("true or false; whether nodes on the local network find this one")] = (
        True
    )
    port_mapping: Annotated[bool, SettingNote("true or false; whether to ask the router to open a port")] = True
    relay: Annotated[bool, SettingNote("true or false; whether to be reached through a relay behind a router")] = True
    training: Annotated[bool, SettingNote(_YES_NO)] = True
    train_when: Annotated[
        Literal["always", "idle"],
        SettingNote("always, or idle: only while nobody touches keyboard or mouse", Applies.AT_ONCE),
    ] = "always"
    idle_minutes: Annotated[
        Real, Field(ge=0.1, le=1440), SettingNote("0.1 to 1440 minutes without keyboard and mouse", Applies.AT_ONCE)
    ] = 5.0
    pause_on_battery: Annotated[bool, SettingNote(_YES_NO, Applies.AT_ONCE)] = True
    pause_on_full_screen: Annotated[
        bool, SettingNote("true or false; whether to pause while a program fills the screen", Applies.AT_ONCE)
    ] = True
    pause_for_programs: Annotated[
        Programs, SettingNote("at most 64 names of programs, such as blender", Applies.AT_ONCE)
    ] = ()
    training_schedule: Annotated[Spans, SettingNote(f"{SCHEDULE_FORM}; none: always", Applies.AT_ONCE)] = ()
    network_schedule: Annotated[Spans, SettingNote(f"{SCHEDULE_FORM}; none: always", Applies.AT_ONCE)] = ()
    monthly_quota: Annotated[
        Real | None,
        Field(gt=0, le=VAST),
        SettingNote(
            f"gigabytes per calendar month, sent and received, more than 0, at most {VAST}; unset: no limit",
            Applies.AT_ONCE,
        ),
    ] = None
    spare_metered: Annotated[
        bool, SettingNote("true or false; whether to send nothing large over a metered connection", Applies.AT_ONCE)
    ] = True
    cpu_percent: Annotated[
        Whole,
        Field(ge=1, le=100),
        SettingNote("1 to 100, the percentage of the time in which training computes", Applies.AT_ONCE),
    ] = 100
    gpu_share: Annotated[
        Whole,
        Field(ge=0, le=100),
        SettingNote(
            "0 to 100, the percentage of the time in which training computes while another program uses the GPU; "
            "0: it pauses; 100: it ignores other programs",
            Applies.AT_ONCE,
        ),
    ] = 25
    gpu_max_temperature: Annotated[
        Whole | None, Field(ge=30, le=110), SettingNote("30 to 110 degrees Celsius; unset: no limit", Applies.AT_ONCE)
    ] = None
    gpu_max_power: Annotated[
        Whole | None, Field(ge=10, le=2000), SettingNote("10 to 2000 watts; unset: no limit", Applies.AT_ONCE)
    ] = None
    browser: Annotated[bool, SettingNote(_YES_NO)] = True
    follow_successor: Annotated[
        bool,
        SettingNote("true or false; whether to follow when the owner continues the run as another one", owner=IN_FILE),
    ] = True
    update_check: Annotated[
        bool, SettingNote("true or false; whether to ask once a day for a newer version", owner=IN_FILE)
    ] = False
    update_url: Annotated[
        str | None,
        SettingNote("the https:// address of a mirror of the releases; unset: that of this version", owner=IN_FILE),
    ] = None
    log_json: Annotated[bool, SettingNote(_YES_NO)] = False
    verbose: Annotated[bool, SettingNote(_YES_NO)] = False

    @property
    def paths(self) -> NodePaths:
        return NodePaths.below(self.data_dir)

    @property
    def upload_bytes_per_second(self) -> float | None:
        """The upload limit in `max_upload`; None if there is none."""
        return None if self.max_upload is None else self.max_upload * 1e6 / BITS_PER_BYTE


ALIASES = {"diloco_steps": "inner_steps"}
OPPOSITES = {
    "headless": "browser",
    "no_browser": "browser",
    "no_training": "training",
    "no_network": "network",
    "no_lan_discovery": "lan_discovery",
    "no_port_mapping": "port_mapping",
    "no_relay": "relay",
}
REMOVED = {"update_key": "The root of trust of updates is a part of the program, and update_url may name any mirror."}
SECRET_KEYS = frozenset({"token", "invite"})


def note_of(key: str) -> SettingNote:
    """The explanation of one setting. Raises KeyError for an unknown name."""
    return next(item for item in Settings.model_fields[key].metadata if isinstance(item, SettingNote))


def application_table() -> dict[str, Applies]:
    """When a stored change of each setting takes effect."""
    return {key: note_of(key).applies for key in Settings.model_fields}
