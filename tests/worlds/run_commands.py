"""Answers of a fake node to commands about runs, their members, and the machines of its wallet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from msgspec import structs

from neuroshard.identity.invitations import read_invitation, to_code
from neuroshard.status.board import (
    AnswerKnock,
    CommandResult,
    Invite,
    JoinRun,
    ListMachines,
    ListMembers,
    NameDeputy,
    OrderMachines,
    Pause,
    Restart,
    Resume,
    RevokeInvitation,
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.machines import Machine, MachineList, machine_status
from neuroshard.status.snapshot import NetworkState, NodeState, NodeStatus
from neuroshard.types import JsonValue, NodeId

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
    ("post", "/api/model-tokens"): {"name": "another program"},
    ("post", "/api/model-tokens/remove"): {"name": "openai"},  # `make_api` has made it
    ("post", "/api/deputies"): {"named": "a1"},
}
AboutMachines: TypeAlias = ListMachines | OrderMachines
AboutRuns: TypeAlias = ListMembers | Invite | RevokeInvitation | NameDeputy | JoinRun | AnswerKnock | AboutMachines
QUESTIONS = (ListMembers, ListMachines)  # they change nothing
OwnerCommand: TypeAlias = Pause | Resume | SaveCheckpoint | Shutdown | Restart | UpdateSettings


def run_result(command: AboutRuns, board: StatusBoard) -> CommandResult | MachineList:
    """What a node that trains alone answers, a made-up invitation, and the machines of its wallet."""
    match command:
        case ListMachines() | OrderMachines():
            return machines_of(board.current(), command)
        case ListMembers():
            nearby: list[JsonValue] = [{"run_id": "3" * 64, "name": "home", "computers": 2}]
            members: dict[str, JsonValue] = {"run": None, "runs": [], "knocks": [], "nearby": nearby}
            return CommandResult(NodeState.TRAINING, "", members)
        case Invite(label):
            made = {"link": "neuroshard://join/x", "label": label or "invitation 1", "qr": ["1"]}
            return CommandResult(NodeState.TRAINING, "The invitation is made.", made)
        case _:
            return CommandResult(NodeState.TRAINING, "Done.")


ATTIC, ABSENT = NodeId("12D3KooWattic"), NodeId("12D3KooWabsent")


def machines_of(status: NodeStatus, command: AboutMachines) -> MachineList:
    """This node, one that trains in the attic and does what it is told, and one that has been away for an hour.

    A node without a network knows no other one.
    """
    here = NodeId(status.node_id or "here")
    known = (
        Machine(here, True, True, status.time, machine_status(status, "laptop")),
        Machine(ATTIC, False, True, status.time, machine_status(status, "attic")),
        Machine(ABSENT, False, False, status.time - 3600, machine_status(status, "cellar"), message="No answer."),
    )
    if status.network.state is NetworkState.OFF:
        known = known[:1]
    match command:
        case ListMachines():
            return MachineList(known)
        case OrderMachines(action, node_id):
            done = {"pause": NodeState.PAUSED, "resume": NodeState.TRAINING}[action]
            told = tuple(_told(one, done) for one in known if node_id in (None, one.node_id))
            return MachineList(told, f"{sum(one.has_obeyed is True for one in told)} of {len(told)} did it.")


def _told(machine: Machine, state: NodeState) -> Machine:
    assert machine.status is not None
    if not machine.is_reachable:
        return replace(machine, has_obeyed=False, message="It did not answer.")
    return replace(machine, status=replace(machine.status, state=state), has_obeyed=True, message="Done.")
