"""Which stages of a run this node held last, kept beside their checkpoints: a restart goes on with those."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.identity import NodeIdentity
from neuroshard.identity.strict_json import parse_json
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import plan_of
from neuroshard.node.own_run import OwnRun
from neuroshard.state.checkpoint_store import stage_folder

log = logging.getLogger(__name__)

FILE_NAME = "stages.json"
_MAX_BYTES = 1024


def note_stages(data_dir: Path, identity: NodeIdentity, run: OwnRun, stages: StageRange) -> tuple[str, ...]:
    """Write down that this node holds these stages now. What to warn of when that is not possible: training goes on."""
    path = _note(data_dir, identity, run)
    try:
        make_folder(path.parent, data_dir)
        write_atomically(path, json.dumps({"start": stages.start, "stop": stages.stop}).encode())
    except OSError as error:
        return (f"{path} cannot be written ({error}): a restart may begin with other layers than these.",)
    return ()


def kept_stages(data_dir: Path, identity: NodeIdentity, run: OwnRun) -> StageRange | None:
    """The stages it held last, as far as it has checkpoints of them; without a note the one that was written last.

    Checkpoints of other stages, which it left to help elsewhere, may be as young: they say nothing.
    """
    plan = plan_of(run.parameters)
    folders = [stage_folder(data_dir, identity.wallet_id, run.run_id, layers) for layers in plan]
    times = {
        index: max(file.stat().st_mtime for file in files)
        for index, folder in enumerate(folders)
        if (files := list(folder.glob("step-*.json")))
    }
    if not times:
        return None
    noted = _noted(_note(data_dir, identity, run), len(plan))
    if noted is not None and any(index in times for index in noted):
        return noted
    newest = max(times, key=lambda index: times[index])
    return StageRange(newest, newest + 1)


def _note(data_dir: Path, identity: NodeIdentity, run: OwnRun) -> Path:
    return stage_folder(data_dir, identity.wallet_id, run.run_id, plan_of(run.parameters)[0]).parent / FILE_NAME


def _noted(path: Path, stage_count: int) -> StageRange | None:
    """None when there is no note, or none that can be read: then the checkpoints must do."""
    try:
        with path.open("rb") as file:
            value = parse_json(file.read(_MAX_BYTES + 1), _MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s. This node goes by its newest checkpoint.", path, error)
        return None
    match value:
        case {"start": int(start), "stop": int(stop)} if 0 <= start < stop <= stage_count:
            return StageRange(start, stop)
        case _:
            log.warning("%s names no stages of this run. This node goes by its newest checkpoint.", path)
            return None
