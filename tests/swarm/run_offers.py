"""Runs and offers of them for tests."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.config.run_parameters import GenesisPins, OuterOptimization, RunParameters
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.runs.offer import RunOffer
from neuroshard.types import Architecture

OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
STRANGER = Wallet.from_secret(TokenSecret("hex", bytes([1] * 32)))
SEED = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
FIRST = RunParameters(
    name="demo",
    version=1,
    architecture=Architecture(64, 2, 2, 1, 128, 512, 32),
    stage_count=1,
    batch_size=4,
    sequences_per_step=8,
    initial_weights_seed=7,
    genesis=GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512),
    outer=OuterOptimization(codec="fp32"),
)


def offer_of(current: RunParameters = FIRST, initial: RunParameters = FIRST, *, signer: Wallet = OWNER) -> RunOffer:
    """An offer whose current parameters `signer` has signed; nothing is checked."""
    return RunOffer(SignedRunParameters.sign(OWNER, initial), SignedRunParameters.sign(signer, current))


def version(number: int, outer_lr: float = 0.8, start: int | None = None) -> RunParameters:
    """A later version, which changes the outer learning rate from an outer step on (by default, of its own number)."""
    outer = replace(FIRST.outer, learning_rate=outer_lr)
    return replace(FIRST, version=number, holds_from_outer_step=number if start is None else start, outer=outer)
