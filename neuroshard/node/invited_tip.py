"""The tip for an invitation: the newest line of a stage that the chains on this computer prove."""

from __future__ import annotations

from pathlib import Path

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.stage_chain import FileChainStore, proven_chain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.consensus.waypoints import lasting_milestone
from neuroshard.identity.invitations import InvitedTip
from neuroshard.model.architecture import plan_of
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.offer import RunOffer
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.types import WalletId


def verified_tip(data_dir: Path, offer: RunOffer, wallet: WalletId) -> InvitedTip | None:
    """The tip of one stage: that of the latest epoch, with the highest value that ledgers keep for long.

    A running node writes its chains at every height. A computer without a chain names the foundation only, and one
    without a foundation has no tip: None. Blocks.
    """
    versions = RunVersions(offer, StoredFoundations(data_dir).read(offer))
    tips = list[InvitedTip]()
    for stage, layers in enumerate(plan_of(offer.parameters)):
        founding = versions.founding_of(stage)
        if founding is not None:
            folder = stage_folder(data_dir, wallet, offer.run_id, layers)
            chain = proven_chain(FileChainStore(folder / ROUNDS_FOLDER), founding)
            line = founding.line(chain.statement)
            # the statement that an heir continues does not replace its line; the next one of the owner does
            epoch = chain.epoch + 1 if line is not None and line.heir is not None else chain.epoch
            tips.append(_tip_of(chain, epoch))
    return max(tips, key=lambda tip: (tip.epoch, tip.height, -tip.stage), default=None)


def _tip_of(chain: Chain, epoch: int) -> InvitedTip:
    milestone, foundation = lasting_milestone(chain.ledger.milestones), bytes.fromhex(chain.statement)
    if milestone is None:
        return InvitedTip(chain.start.stage, epoch, foundation)
    return InvitedTip(chain.start.stage, epoch, foundation, milestone.height, bytes.fromhex(milestone.value))
