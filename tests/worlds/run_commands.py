"""Answers of a fake node to commands about runs and their members."""

from __future__ import annotations

from typing import TypeAlias

from neuroshard.status.board import (
    AnswerKnock,
    CommandResult,
    Invite,
    JoinRun,
    ListMembers,
    NameDeputy,
    Pause,
    Resume,
    RevokeInvitation,
    SaveCheckpoint,
    Shutdown,
    UpdateSettings,
)
from neuroshard.status.snapshot import NodeState

AboutRuns: TypeAlias = ListMembers | Invite | RevokeInvitation | NameDeputy | JoinRun | AnswerKnock
OwnerCommand: TypeAlias = Pause | Resume | SaveCheckpoint | Shutdown | UpdateSettings


def run_result(command: AboutRuns) -> CommandResult:
    """What a node that trains alone answers, and a made-up invitation."""
    match command:
        case ListMembers():
            return CommandResult(NodeState.TRAINING, "", {"run": None, "runs": [], "knocks": []})
        case Invite(label):
            made = {"link": "neuroshard://join/x", "label": label or "invitation 1", "qr": ["1"]}
            return CommandResult(NodeState.TRAINING, "The invitation is made.", made)
        case _:
            return CommandResult(NodeState.TRAINING, "Done.")
