"""Settings as people see them: title, sentence, group and level of each, and the control that fits its type.

Ranges and choices come from the types in `Settings`, which check every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from neuroshard.config.settings import SECRET_KEYS, Applies, Settings, note_of


class Level(StrEnum):
    """The readers for whom a setting is made."""

    BASIC = "basic"
    ADVANCED = "advanced"


class InputKind(StrEnum):
    """The input with which a page changes a setting."""

    SWITCH = "switch"
    CHOICE = "choice"
    NUMBER = "number"
    LIST = "list"
    TEXT = "text"
    NONE = "none"  # only the owner changes it, outside a page


@dataclass(frozen=True)
class SettingForm:
    """Words for one setting."""

    group: str
    title: str
    sentence: str  # what it does
    unit: str = ""
    level: Level = Level.BASIC
    unset: str = ""  # meaning of no value


@dataclass(frozen=True)
class SettingControl:
    """The control of one setting, from its type."""

    kind: InputKind
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_whole: bool = False
    may_be_unset: bool = False
    is_above_minimum: bool = False  # the minimum itself is not allowed


_WORK, _USE, _NET, _RUN, _PROGRAM = (
    "When it works",
    "What it may use of this computer",
    "The network",
    "The run and its data",
    "This program",
)
_MORE = Level.ADVANCED
FORMS: dict[str, SettingForm] = {
    "training": SettingForm(
        _WORK, "Train", "Train from the start of the node. When off, it starts paused.", level=_MORE
    ),
    "train_when": SettingForm(_WORK, "Train when", "Train always, or only while nobody uses this computer."),
    "idle_minutes": SettingForm(_WORK, "Idle after", "Time without keyboard and mouse.", "minutes"),
    "pause_on_battery": SettingForm(_WORK, "Pause on battery", "Pause while this computer is not plugged in."),
    "pause_on_full_screen": SettingForm(_WORK, "Pause in full screen", "Pause while a game or film fills the screen."),
    "pause_for_programs": SettingForm(
        _WORK, "Pause for programs", "Pause while one of these programs runs, such as blender.", unset="none"
    ),
    "training_schedule": SettingForm(_WORK, "Training hours", "Train only at these times of the week.", unset="always"),
    "cpu_percent": SettingForm(_WORK, "Processor time", "Share of the time in which training computes.", "%"),
    "gpu_share": SettingForm(
        _WORK, "GPU time", "Share of the time in which training computes while another program uses the GPU.", "%"
    ),
    "gpu_max_temperature": SettingForm(
        _WORK, "GPU temperature", "Slow down above this temperature.", "\N{DEGREE SIGN}C", _MORE, "no limit"
    ),
    "gpu_max_power": SettingForm(_WORK, "GPU power", "Slow down above this power.", "W", _MORE, "no limit"),
    "device": SettingForm(_USE, "Compute on", "The processor, or a GPU such as cuda or cuda:1.", level=_MORE),
    "compile": SettingForm(
        _USE, "Compilation", "Compile the model for the GPU while training has begun already.", level=_MORE
    ),
    "optimizer_memory": SettingForm(
        _USE, "Optimizer", "Keep the optimizer's numbers on the GPU, or in this computer's memory.", level=_MORE
    ),
    "max_gpu_memory": SettingForm(
        _USE, "GPU memory", "Training never uses more of the GPU's memory.", "MB", _MORE, "nine tenths"
    ),
    "site": SettingForm(
        _USE, "GPUs", "Train on several GPUs of this computer: auto for all, their number, or off.", level=_MORE
    ),
    "site_mode": SettingForm(
        _USE,
        "Weights on GPUs",
        "A copy on every GPU, or a part on each for models that do not fit one of them.",
        level=_MORE,
    ),
    "site_timeout": SettingForm(
        _USE, "GPU timeout", "A GPU that does not answer for this time is started again.", "seconds", _MORE
    ),
    "memory": SettingForm(
        _USE, "Memory", "Training never uses more. A change needs a restart.", "MB", unset="measured"
    ),
    "cpu_threads": SettingForm(_USE, "CPU threads", "Number of threads that train.", "threads", unset="measured"),
    "max_storage": SettingForm(_USE, "Training text on disk", "Space for training text.", "MB"),
    "max_checkpoint_storage": SettingForm(_USE, "Saved work on disk", "Space for checkpoints and copies.", "MB"),
    "checkpoint_min_seconds": SettingForm(
        _USE, "Time between checkpoints", "A crash loses at most about this much work.", "seconds", _MORE
    ),
    "checkpoint_write_gb_per_day": SettingForm(
        _USE, "Checkpoint writing", "Most data that checkpoints write to the disk.", "GB per day", _MORE
    ),
    "max_upload": SettingForm(_NET, "Upload limit", "Most that is sent to other nodes.", "Mbit/s", unset="no limit"),
    "upload_percent": SettingForm(
        _NET, "Upload share", "Most that is sent, as a share of your line's measured upload speed.", "%"
    ),
    "monthly_quota": SettingForm(
        _NET, "Monthly traffic", "Sent and received in a calendar month.", "GB per month", unset="no limit"
    ),
    "spare_metered": SettingForm(
        _NET, "Metered connections", "Send and receive nothing large while the connection is metered, as with a phone."
    ),
    "network_schedule": SettingForm(
        _NET, "Network hours", "Talk to other nodes only at these times of the week.", unset="always"
    ),
    "network": SettingForm(_NET, "Network", "Train with other computers. When off, this one trains alone."),
    "lan_discovery": SettingForm(
        _NET, "Local network", "Let computers in the same local network find this one.", level=_MORE
    ),
    "port_mapping": SettingForm(_NET, "Router port", "Ask the router to open a port for other nodes.", level=_MORE),
    "relay": SettingForm(_NET, "Relays", "Be reached through a relay when the router lets nobody in.", level=_MORE),
    "p2p_port": SettingForm(_NET, "Node port", "Port for other nodes. 0 takes a free one and keeps it.", level=_MORE),
    "p2p_host": SettingForm(_NET, "Node address", "Address of this computer for other nodes.", level=_MORE),
    "peer": SettingForm(_NET, "Known nodes", "Addresses of nodes to call first.", level=_MORE, unset="none"),
    "run": SettingForm(_RUN, "Run", "The run to train in.", level=_MORE, unset="the default run"),
    "invite": SettingForm(_RUN, "Invitation", "The invitation with which this node joins a run.", level=_MORE),
    "organiser": SettingForm(
        _RUN, "Organiser", "Address of the organiser that admits this node.", level=_MORE, unset="the last one"
    ),
    "public_name": SettingForm(
        _RUN, "Public name", "Name of your wallet on the page of an organised run.", level=_MORE, unset="none"
    ),
    "genesis": SettingForm(_RUN, "Training text from", "Place of the training text.", level=_MORE),
    "text": SettingForm(_RUN, "Own text", "Folder with your own text files to train on.", level=_MORE, unset="none"),
    "archive": SettingForm(
        _RUN,
        "Archive",
        "Keep a checkpoint for ever at regular outer steps of a run, so that its model of an earlier time can be "
        "assembled. The archive counts as saved work on disk.",
        level=_MORE,
    ),
    "archive_every": SettingForm(
        _RUN, "Archive every", "Outer steps between two archived checkpoints.", "outer steps", _MORE
    ),
    "inner_steps": SettingForm(
        _RUN,
        "Steps between rounds",
        "Longest interval between two rounds of a run of your own. In other runs, their owner decides.",
        "steps",
        _MORE,
        "100",
    ),
    "max_stages": SettingForm(
        _RUN, "Stages", "Most parts of a model that this computer holds.", "stages", _MORE, "as many as fit the memory"
    ),
    "spare_stages": SettingForm(
        _RUN, "Spare stages", "Further parts that it holds while no other computer does.", "stages", _MORE
    ),
    "browser": SettingForm(_PROGRAM, "Open the dashboard", "Open this page when the node starts.", level=_MORE),
    "host": SettingForm(_PROGRAM, "Dashboard address", "Address on which the dashboard answers.", level=_MORE),
    "port": SettingForm(_PROGRAM, "Dashboard port", "Port of dashboard and API. 0 takes any free one.", level=_MORE),
    "data_dir": SettingForm(_PROGRAM, "Data folder", "Checkpoints, training text, keys and logs.", level=_MORE),
    "token": SettingForm(_PROGRAM, "Token", "The secret from which the wallet follows.", level=_MORE),
    "token_file": SettingForm(_PROGRAM, "Token file", "File that contains the token.", level=_MORE, unset="none"),
    "follow_successor": SettingForm(
        _PROGRAM,
        "Follow the owner to another run",
        "Continue with the run with which the owner continues this one.",
        level=_MORE,
    ),
    "update_check": SettingForm(_PROGRAM, "Look for updates", "Ask once a day for a newer version.", level=_MORE),
    "update_url": SettingForm(
        _PROGRAM, "Updates from", "Address of a mirror of the releases.", level=_MORE, unset="this version's address"
    ),
    "log_json": SettingForm(_PROGRAM, "Log as JSON", "Write one JSON object per log line.", level=_MORE),
    "verbose": SettingForm(_PROGRAM, "Detailed log", "Log more details.", level=_MORE),
}


def control_of(key: str) -> SettingControl:
    """The control for a setting, from its type and limits. Raises KeyError for an unknown name."""
    field, note = Settings.model_fields[key], note_of(key)
    kinds, bounds = _kinds(_hints()[key])
    may_be_unset = NoneType in kinds or field.default == ()
    choices = tuple(choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind))
    if note.owner or note.applies is Applies.NOT_STORED or key in SECRET_KEYS:
        kind = InputKind.NONE
    elif bool in kinds:
        kind = InputKind.SWITCH
    elif choices:
        kind = InputKind.CHOICE
    elif {int, float} & set(kinds):
        kind = InputKind.NUMBER
    elif any(get_origin(one) is tuple for one in kinds):
        kind = InputKind.LIST
    else:
        kind = InputKind.TEXT
    if kind is not InputKind.NUMBER:
        return SettingControl(kind, choices, may_be_unset=may_be_unset)
    least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le")
    return SettingControl(kind, (), least, most, int in kinds, may_be_unset, "gt" in bounds)


def advice_of(key: str) -> str:
    """Advice for a field that may stay empty: the values that a setting accepts, in a sentence."""
    control = control_of(key)
    if control.kind is not InputKind.NUMBER or control.minimum is None or control.maximum is None:
        return f"Use {note_of(key).allowed}."
    number = "a whole number" if control.is_whole else "a number"
    above = f"above {control.minimum:,.10g} and" if control.is_above_minimum else f"from {control.minimum:,.10g}"
    most = f"at most {control.maximum:,.10g}" if control.is_above_minimum else f"to {control.maximum:,.10g}"
    return f"Enter {number} {above} {most}, or leave the field empty."


@cache  # the annotations are texts: evaluating them for each setting took 90 ms in every answer
def _hints() -> dict[str, Any]:
    return get_type_hints(Settings, include_extras=True)


def _kinds(hint: Any) -> tuple[list[Any], dict[str, float]]:
    """The types in a hint without their annotations, and the bounds of a number: `ge` or `gt`, and `le`."""
    kinds, bounds, waiting = list[Any](), dict[str, float](), [hint]
    while waiting:
        one = waiting.pop(0)
        if get_origin(one) is Annotated:
            inner, *facts = get_args(one)
            waiting.append(inner)
            for fact in facts:
                rules = fact.metadata if isinstance(fact, FieldInfo) else ()
                bounds |= {
                    name: getattr(rule, name) for rule in rules for name in ("ge", "gt", "le") if hasattr(rule, name)
                }
        elif get_origin(one) in (Union, UnionType):
            waiting += get_args(one)
        else:
            kinds.append(one)
    return kinds, bounds
