"""Routes about runs: links that were opened, joining another run, and the run's invitations, members and deputies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from fastapi import APIRouter
from pydantic import Field, JsonValue

from neuroshard.api.arrival import (
    InvitationBody,
    InvitationRequest,
    NearbyRunBody,
    Room,
    checked_invitation,
    invitation_body,
)
from neuroshard.api.context import ApiContext, carry_out_run_command
from neuroshard.api.presets import line_of
from neuroshard.api.problems import WrongFieldsError
from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.api.requests import CommandBody, NoMembers
from neuroshard.errors import UsageError
from neuroshard.identity.invitations import MAX_LABEL_CHARACTERS, MAX_USES, Invitation, to_code
from neuroshard.status.board import AnswerKnock, Invite, JoinRun, ListMembers, NameDeputy, RevokeInvitation
from neuroshard.types import is_loopback


class IssuedBody(ResponseBody):
    """An invitation that was made on this computer."""

    label: EncodableText
    key: str = Field(description="first digits of its key")
    uses: int
    left: int = Field(description="wallets that can still join with it")
    not_after: int
    state: Literal["valid", "expired", "revoked"]


class MemberBody(ResponseBody):
    """A wallet that joined with an invitation."""

    wallet_id: str
    label: EncodableText
    words: EncodableText = Field(description="four words for the wallet's key")


class RunMembersBody(ResponseBody):
    """The run of friends, or organised run, that this node serves."""

    run_id: str
    name: EncodableText
    is_owner: bool
    may_invite: bool
    has_deputies: bool = Field(description="whether the owner can name deputies: in a run of friends")
    deputies: list[str] = Field(description="wallets that may found the run again while the owner is away")
    invitations: list[IssuedBody]
    members: list[MemberBody]


class KnownRunBody(ResponseBody):
    """A run that was joined from this computer."""

    run_id: str
    name: EncodableText
    is_current: bool


class ShownLinkBody(ResponseBody):
    """The invitation that was opened or pasted last."""

    invitation: InvitationBody | None
    fault: EncodableText | None = Field(description="why a link that was opened cannot be used")


class KnockBody(ResponseBody):
    """A computer of the local network that asks to join."""

    wallet_id: str
    name: EncodableText
    words: EncodableText = Field(description="four words for its wallet's key")


class MembersBody(ResponseBody):
    """GET /api/members: the run's invitations and members, and the runs that this computer knows."""

    run: RunMembersBody | None = Field(description="null: this node serves no run with invitations")
    runs: list[KnownRunBody]
    knocks: list[KnockBody]
    nearby: list[NearbyRunBody] | None = Field(description="other runs on the local network; null: it is not searched")
    shown: ShownLinkBody


class InviteRequest(RequestBody):
    """POST /api/invitations: the limits of a new invitation."""

    label: str = Field(default="", max_length=MAX_LABEL_CHARACTERS)
    uses: int = Field(default=1, ge=1, le=MAX_USES)
    days: float = Field(default=7, ge=0.01, le=3650)
    may_invite: bool = False


class MadeInvitationBody(ResponseBody):
    """A new invitation. It is shown only now: the node does not keep its secret."""

    message: EncodableText
    label: EncodableText
    link: str
    qr: list[str] = Field(description="rows of the QR code of the link; 1: a dark module")


class NamedRequest(RequestBody):
    """An invitation by its label or the first digits of its key, or a wallet by those of its id."""

    named: str = Field(min_length=1, max_length=100)


class JoinRequest(RequestBody):
    """POST /api/join: the run of the invitation that is shown, a known one or one nearby. None: one of its own."""

    run_id: str | None = Field(pattern=r"^[0-9a-f]{64}$")


class KnockRequest(RequestBody):
    """POST /api/knocks: the owner's answer to a computer that asks to join."""

    wallet_id: str = Field(pattern=r"^[0-9a-f]{1,64}$")
    is_allowed: bool


@dataclass
class ShownLink:
    """The invitation on the page, which is joined only after the owner has pressed Join. One event loop uses it."""

    context: ApiContext
    invitation: Invitation | None = None
    fault: str | None = None

    def read(self, text: str) -> None:
        """Read an invitation. Raises WrongFieldsError for the field `invitation`, and then keeps the last one."""
        try:
            self.invitation = checked_invitation(text, self.context.clock(), is_local=self._is_local)
        except UsageError as error:
            raise WrongFieldsError(("invitation", f"{error.message} {error.action}".strip())) from None
        self.fault = None

    def open_link(self, text: str) -> None:
        """Read a link that was opened on this computer; the page shows why it cannot be used."""
        try:
            self.read(text)
        except WrongFieldsError as error:
            self.invitation, self.fault = None, error.message

    def close(self) -> None:
        """Forget the invitation."""
        self.invitation, self.fault = None, None

    def view(self) -> ShownLinkBody:
        """The invitation as the page shows it."""
        shown, status = self.invitation, self.context.board.current()
        memory = None if status.memory is None else status.memory.limit_mb
        keys = ("max_upload", "upload_percent", "monthly_quota")
        room = Room.of({"memory": memory, **{key: self._setting(key) for key in keys}}, line_of(status.network).upload)
        body = None if shown is None else invitation_body(shown, room, is_local=self._is_local)
        return ShownLinkBody(invitation=body, fault=self.fault)

    @property
    def _is_local(self) -> bool:
        return is_loopback(str(self._setting("p2p_host")))

    def _setting(self, key: str) -> JsonValue:
        settings = cast("Mapping[str, Mapping[str, JsonValue]]", self.context.config_view())
        return settings.get(key, {}).get("value")


def member_routes(context: ApiContext) -> APIRouter:
    """Make the routes about runs and their members."""
    router = APIRouter(tags=["runs"])
    shown = ShownLink(context)
    if context.opened_link is not None:
        shown.open_link(context.opened_link)

    @router.get("/api/members")
    async def members() -> MembersBody:
        """The run's invitations and members, the runs that this computer knows, and the invitation that is shown."""
        result = await carry_out_run_command(context, ListMembers())
        return MembersBody.model_validate({**(result.details or {}), "shown": shown.view()})

    @router.post("/api/link", status_code=202)
    async def open_link(body: InvitationRequest) -> CommandBody:
        """Show a link that was opened on this computer. Nothing is joined, downloaded or dialled."""
        shown.open_link(body.text)
        return CommandBody(state=context.board.current().state, message="The dashboard shows the invitation.")

    @router.post("/api/invitation")
    async def show(body: InvitationRequest) -> ShownLinkBody:
        """Read an invitation and show it. Nothing is joined, downloaded or dialled."""
        shown.read(body.text)
        return shown.view()

    @router.post("/api/invitation/close", status_code=202)
    async def close(body: NoMembers | None = None) -> ShownLinkBody:
        """Forget the invitation that is shown."""
        del body
        shown.close()
        return shown.view()

    @router.post("/api/join", status_code=202)
    async def join(body: JoinRequest) -> CommandBody:
        """Join another run after a checkpoint. The node then starts again in this process."""
        invitation = shown.invitation
        is_shown = invitation is not None and invitation.run_id == body.run_id
        code = to_code(invitation) if invitation is not None and is_shown else None
        result = await carry_out_run_command(context, JoinRun(code, None if is_shown else body.run_id))
        shown.close()
        return CommandBody(state=result.state, message=result.message)

    add_owner_routes(router, context)
    return router


def add_owner_routes(router: APIRouter, context: ApiContext) -> None:
    """Add the routes of those who may invite."""

    @router.post("/api/invitations", status_code=201)
    async def invite(body: InviteRequest) -> MadeInvitationBody:
        """Make an invitation. Its link is in this response only."""
        command = Invite(body.label.strip(), body.uses, body.days, body.may_invite)
        result = await carry_out_run_command(context, command)
        return MadeInvitationBody.model_validate({**(result.details or {}), "message": result.message})

    @router.post("/api/invitations/revoke", status_code=202)
    async def revoke(body: NamedRequest) -> CommandBody:
        """End an invitation, and the membership of the wallets that joined with it."""
        result = await carry_out_run_command(context, RevokeInvitation(body.named))
        return CommandBody(state=result.state, message=result.message)

    @router.post("/api/knocks", status_code=202)
    async def answer_knock(body: KnockRequest) -> CommandBody:
        """Let a computer of the local network into the run, or refuse it."""
        result = await carry_out_run_command(context, AnswerKnock(body.wallet_id, body.is_allowed))
        return CommandBody(state=result.state, message=result.message)

    @router.post("/api/deputies", status_code=202)
    async def name_deputy(body: NamedRequest) -> CommandBody:
        """Let a member found the run again while its owner is away."""
        result = await carry_out_run_command(context, NameDeputy(body.named))
        return CommandBody(state=result.state, message=result.message)
