"""Commands about the seats of a run and its continuation: `neuroshard run refound`, `trust`, `branch`, `rollback`."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.invitations import OwnerToken, RunName, name_voter, node_status, only_run
from neuroshard.cli.options import AsJson, DataDir, GenesisSource, TokenFile, end_of_second, given

if TYPE_CHECKING:
    from neuroshard.consensus.foundation import Foundations, StageStart
    from neuroshard.node.branching import Branch, BranchWish, RunBrancher
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.offer import RunOffer

WAIT_SECONDS, LOOK_SECONDS = 15.0, 0.2

RunArgument = Annotated[str, typer.Argument(metavar="FILE-OR-ID", help="A signed file, or the id of a run known here.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]
AtTime = Annotated[
    float | None,
    typer.Option(
        "--at",
        parser=end_of_second,
        metavar="TIME",
        help="The newest saved state at or before this local time: 2026-11-29T14:30.",
    ),
]
AtOuterStep = Annotated[
    int | None, typer.Option("--outer-step", metavar="N", min=0, help="The saved state after N outer steps.")
]
StatesFolder = Annotated[
    Path | None,
    typer.Option(
        "--states",
        metavar="FOLDER",
        help="Also use the certified states that `checkpoint assemble --out FOLDER` has collected, for stages that "
        "this computer does not have.",
    ),
]
ChangesFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML or YAML: settings of the new run that differ, not the model's."
    ),
]


def refound(
    run: Annotated[str, typer.Argument(metavar="FILE-OR-ID", help="A signed file, or the id of a run known here.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help="Token of the owner's wallet; NEUROSHARD_TOKEN is safer."),
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Continue the run from the state of your node, with your node as the only voter.

    The run's owner can do this, and so can a deputy that the owner has named with `run trust`. Use it when too few
    voting nodes come back, or when two statements contradict each other. Other nodes keep their work and get a seat
    again after 30 minutes of accepted work. Steps that only other nodes know are lost, so let your node connect to them
    first. A running node continues the run at once, a stopped one at its next start.

    If the only node with a stage is gone, a node that kept its copy can continue that stage alone in the same way.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.errors import UsageError
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    folder, wallet = loaded.settings.data_dir, wallet_of(loaded)[0]
    offer, stored = named_offer(run, folder), StoredFoundations(folder)
    known, heir_of = stored.read(offer), list[int]()
    if not known.may_sign(wallet.public_key):
        from neuroshard.node.founding import inherited_stages  # loads PyTorch

        heir_of = inherited_stages(folder, offer, wallet.wallet_id)
        if not heir_of:
            raise UsageError(
                "Only the run's owner and its deputies can use `run refound`.",
                "Use the token of one of them. The owner names a deputy with `neuroshard run trust`. "
                "A node that kept the copy of a stage whose only node is gone can continue that stage.",
            )
    what = f"of stage {', '.join(str(stage + 1) for stage in heir_of)}" if heir_of else "of the run"
    if not yes:
        typer.confirm(f"Your node becomes the only voter {what}. Continue?", abort=True, err=True)
    stored.request_new(offer)
    starts = _new_starts(stored, offer, known)
    if as_json:
        stages = [{"stage": start.stage, "outer_step": start.outer_step} for start in starts]
        typer.echo(json.dumps({"run_id": offer.run_id, "is_founded": bool(starts), "stages": stages}))
    elif not starts:
        typer.echo("Start your node. It continues the run when it has the state.")
    else:
        typer.echo(f"Your node is the only voter {what} from now on:")
        for start in starts:
            typer.echo(f"  stage {start.stage + 1}: from outer step {start.outer_step:,}")


def trust(
    member: Annotated[
        str,
        typer.Argument(
            metavar="WALLET",
            help="A wallet from `run members`, or its first 8 digits. In a run that is open to strangers: all 32 "
            "digits, which `neuroshard status` prints on that wallet's computer.",
        ),
    ],
    run: RunName = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Stop trusting this wallet.")] = False,
    token: OwnerToken = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
) -> None:
    """Name a deputy or, in a run that is open to strangers, a wallet that may vote on its steps.

    A deputy is a member that can continue the run with `run refound` while you are away. A deputy has no other right of
    the owner, and your later statements replace those of a deputy. A run has at most 4 deputies.

    In a run that is open to strangers, only wallets that you have named get seats. They get them after 30 minutes of
    accepted work, the first three together. With four seats, one may be offline or lie. Name at most 32 wallets, of
    people that you know.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.identity.wallet import wallet_id_of
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.stored_passes import StoredPasses
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    folder = loaded.settings.data_dir
    offer = named_offer(run or only_run(folder, node_status(folder)), folder)
    stored = StoredFoundations(folder)
    if offer.parameters.admission != "friends":
        typer.echo(name_voter(stored, offer, wallet_of(loaded)[0], member, withdraw=withdraw))
        return
    owner = wallet_of(loaded)[0]
    if withdraw:
        named = [key for key in stored.read(offer).deputies if wallet_id_of(key).startswith(member.lower())]
        stored.withdraw_deputies(offer, owner, named)
    else:
        stored.name_deputy(offer, owner, StoredPasses(folder, offer).member(member).statement.wallet)
    names = ", ".join(wallet_id_of(key)[:8] for key in stored.read(offer).deputies)
    typer.echo(
        f"Deputies of run {offer.parameters.name}: {names or 'none'}. Members that are online learn it within seconds."
    )


def branch(
    run: RunArgument,
    at: AtTime = None,
    outer_step: AtOuterStep = None,
    config: ChangesFile = None,
    states: StatesFolder = None,
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Continue from the newest saved state even if a newer one was certified.")
    ] = False,
    genesis: GenesisSource = None,
    token: Annotated[
        str | None, typer.Option("--token", metavar="TOKEN", help="Wallet that will own the new run. (default: yours)")
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run as a new run of your own, from the state of your node or from an earlier one.

    Use it for a run whose owner, deputies and voting nodes are gone, or for another attempt with other settings. If the
    owner or a deputy can come back, use `run refound` instead.

    Weights, outer step, data and tokenizer stay. Your wallet owns the new run and your node is the only voter. The
    first run stays stored, and nodes that still train it are not affected. Friends need new invitations. Stop your node
    first.

    With --at or --outer-step the moments of the optimizer begin at zero, and the learning rate warms up for 20 steps.
    """
    wish = _wish(at, outer_step, config, states)
    question = "Continue run {name} as a new run of wallet {wallet}?"
    flags = given(token=token, token_file=token_file, data_dir=data_dir, genesis=genesis)
    offer, made, serve = _branched(
        run, flags, None if yes else question, lambda one, of: one.branch(of, force=force, wish=wish)
    )
    _print_branch(offer, made, serve, as_json=as_json)
    if not as_json:
        typer.echo("Friends need new invitations: `neuroshard run invite` makes one for each while your node runs.")


def roll_run_back(
    run: RunArgument,
    at: AtTime = None,
    outer_step: AtOuterStep = None,
    config: ChangesFile = None,
    states: StatesFolder = None,
    yes: Yes = False,
    genesis: GenesisSource = None,
    token: OwnerToken = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Continue your run from an earlier state, as a new run that the members follow. Only the owner can do this.

    It makes a branch and signs it as the successor of the run. A member whose node has `follow_successor` (the default)
    ends its round, saves, and continues with the new run. Friends get their passes for the new run from your node, so
    start it afterwards; in an organised run, also start the organiser with the id of the new run. Nothing of the old
    run is deleted. The same request gives the same run.

    Stop your node first. The states that it has saved are in `neuroshard checkpoint list`. For stages that only other
    nodes have, collect the states with `neuroshard checkpoint assemble` while they run, and add --states.
    """
    from neuroshard.errors import UsageError

    wish = _wish(at, outer_step, config, states)
    if not wish.has_chosen:
        raise UsageError("No state is named.", "Name one: --at TIME or --outer-step N.")
    question = (
        "Continue run {name} from the earlier state? Members of {run} follow, and their later work is left behind."
    )
    flags = given(token=token, token_file=token_file, data_dir=data_dir, genesis=genesis)
    offer, made, serve = _branched(run, flags, None if yes else question, lambda one, of: one.rollback(of, wish))
    _print_branch(offer, made, serve, as_json=as_json)
    if not as_json:
        typer.echo("Members follow when your node runs.")


def _wish(at: float | None, outer_step: int | None, config: Path | None, states: Path | None) -> BranchWish:
    from neuroshard.errors import UsageError
    from neuroshard.node.branching import BranchWish
    from neuroshard.runs.run_file import RunConfig, read_run_config

    if at is not None and outer_step is not None:
        raise UsageError("--at and --outer-step name two states.", "Give one of them.")
    if states is not None and at is None and outer_step is None:
        raise UsageError("--states needs the state to choose.", "Name it: --at TIME or --outer-step N.")
    changes: RunConfig = {} if config is None else read_run_config(config)
    return BranchWish(at, outer_step, None if states is None else states.absolute(), changes)


def _branched(
    run: str, flags: Mapping[str, object], question: str | None, make: Callable[[RunBrancher, RunOffer], Branch]
) -> tuple[RunOffer, Branch, str]:
    """Branch a run while no node runs on the data folder, and return the command that starts a node with it."""
    from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
    from neuroshard.config.loading import load_settings
    from neuroshard.errors import UsageError
    from neuroshard.host.identity import node_identity, wallet_of
    from neuroshard.node.branching import RunBrancher
    from neuroshard.runs.creation import Owner
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(flags, os.environ)
    settings = loaded.settings
    offer, wallet = named_offer(run, settings.data_dir), wallet_of(loaded)[0]
    if question is not None:
        words = question.format(name=offer.parameters.name, run=offer.run_id[:16], wallet=wallet.wallet_id[:8])
        typer.confirm(words, abort=True, err=True)
    try:
        lock = InstanceLock.acquire(settings.data_dir)
    except AlreadyRunningError as error:
        raise UsageError("A node is running on this data folder.", "Stop it first: `neuroshard stop`.") from error
    try:
        node_id = node_identity(wallet, settings.data_dir).node_id
        made = make(RunBrancher(Owner(wallet, settings.data_dir), node_id, settings.max_checkpoint_storage), offer)
    finally:
        lock.release()
    source = settings.genesis if loaded.sources["genesis"] != "default" else None
    folder = ["--data-dir", str(flags["data_dir"])] if "data_dir" in flags else []
    here = ["neuroshard", "--run", made.choice.offer.run_id, *folder, *(["--genesis", source] if source else [])]
    return offer, made, shlex.join(here)


def _print_branch(offer: RunOffer, made: Branch, serve: str, *, as_json: bool) -> None:
    new, is_new = made.choice.offer, made.choice.is_new
    if as_json:
        stages = [
            {"layers": [each.saved.layers.start, each.saved.layers.stop], "step": each.saved.generation.step}
            | {"outer_step": each.saved.generation.outer_step, "is_tip": each.is_tip}
            for each in made.stages
        ]
        facts = {"run_id": new.run_id, "continues": offer.run_id, "is_new": is_new, "stages": stages, "serve": serve}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{'Run' if is_new else 'Known already: run'} {new.run_id} continues run {offer.run_id[:16]}.")
    for each in made.stages:
        layers, state = each.saved.layers, each.saved.generation
        typer.echo(f"  layers {layers.start + 1}-{layers.stop}: step {state.step:,}, outer step {state.outer_step:,}")
    typer.echo(f"Start it here:  {serve}")


def _new_starts(stored: StoredFoundations, offer: RunOffer, before: Foundations) -> tuple[StageStart, ...]:
    """Wait for the statement that the running node signs; no stages if none comes in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    epoch = max((each.foundation.epoch for each in before.highest), default=-1)
    inherited = {each.id for heirs in before.successions.values() for each in heirs}
    while time.monotonic() < deadline:
        now = stored.read(offer)
        if now.current is not None and now.current.foundation.epoch > epoch:
            return now.current.foundation.stages
        new = [each for heirs in now.successions.values() for each in heirs if each.id not in inherited]
        if new:
            return tuple(each.succession.start for each in new)
        time.sleep(LOOK_SECONDS)
    return ()
