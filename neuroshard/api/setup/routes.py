"""Routes of the wizard. Each answers with everything there is to show; all need a session or the API secret."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from neuroshard.api.bodies.actions import CommandBody, NoMembers
from neuroshard.api.setup.bodies import BackupRequest, ChoicesRequest, FinishedBody, SetupBody, WalletRequest
from neuroshard.api.setup.desk import SetupDesk
from neuroshard.errors import NotReadyError

ANSWERED = ["GET", "POST", "PATCH"]  # methods of a node's routes
WAITING = "This node waits to be set up in the browser."


def setup_routes(desk: SetupDesk, stop: Callable[[str], object]) -> APIRouter:
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
