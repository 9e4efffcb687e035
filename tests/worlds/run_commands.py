"""Answers of a fake node to commands about runs and their members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

from msgspec import structs

from neuroshard.identity.invitations import read_invitation, to_code
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

VECTOR = Path(__file__).parents[1] / "vectors" / "invitation.json"


def _public_invitation() -> str:
    """The invitation of the vectors with a node that has a public address. Nobody dials it."""
    invitation = read_invitation(json.loads(VECTOR.read_text("utf-8"))["code"])
    peers = tuple(peer.replace("203.0.113.7", "9.9.9.9") for peer in invitation.peers)
    return to_code(structs.replace(invitation, peers=peers))


RUN_BODIES: dict[tuple[str, str], object] = {
    ("post", "/api/link"): {"text": "not an invitation"},  # the page says why it cannot be used
    ("post", "/api/invitation"): {"text": _public_invitation()},
    ("post", "/api/join"): {"run_id": None},
    ("post", "/api/invitations"): {},
    ("post", "/api/invitations/revoke"): {"named": "Ada"},
    ("post", "/api/knocks"): {"wallet_id": "a1", "is_allowed": False},
    ("post", "/api/deputies"): {"named": "a1"},
}
AboutRuns: TypeAlias = ListMembers | Invite | RevokeInvitation | NameDeputy | JoinRun | AnswerKnock
QUESTIONS = (ListMembers,)  # they change nothing
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
