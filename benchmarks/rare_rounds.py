"""How few bytes are enough: rounds after hundreds of inner steps, in every way that sends little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.laboratory import BATCH, HELD_OUT, SHAPE, Outcome, Scheme, apart, parameter_count, together
from benchmarks.record import Report, Row
from benchmarks.schemes import REPLICAS, SEEDS, WARM_STEPS, difference, plot, prepared, told
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization

STEPS = size(4_000, 8)
ALONE, PLAIN = "one replica alone", "fp32, 500 inner steps"
OFTEN, RARELY, MORE_RARELY = size((100, 500, 1000), (4, 4, 8))  # inner steps
OUTER = OuterOptimization(inner_steps=RARELY, interval="fixed", aggregator="trimmed_mean")
SPARSE = replace(OUTER, codec="topk", aggregator="mean", learning_rate=1.0)
TOGETHER: Mapping[str, OuterOptimization] = {
    PLAIN: replace(OUTER, codec="fp32"),
    "int8, 500 inner steps": OUTER,
    "int4, 500 inner steps": replace(OUTER, codec="int4"),
    "int4, 1,000 inner steps": replace(OUTER, codec="int4", inner_steps=MORE_RARELY),
    "int4, streaming, 1,000 inner steps": replace(OUTER, codec="int4", strategy="streaming", inner_steps=MORE_RARELY),
    "topk, outer step 1.0, 100 inner steps": replace(SPARSE, inner_steps=OFTEN),
    "topk, outer step 1.0, 500 inner steps": SPARSE,
}
AIM = 0.01  # bits of a parameter and step


def measure() -> Report:
    """One model for each seed and way."""
    names = (ALONE, *TOGETHER)
    outcomes = of_each(_outcome, [(name, seed) for name in names for seed in SEEDS])
    found = {name: [outcomes[name, seed] for seed in SEEDS] for name in names}
    rows = [Row(name, told(ways), "report", None) for name, ways in found.items()]
    rows += [difference(found, name, PLAIN, 0.0) for name in TOGETHER if name != PLAIN]
    rows.append(_aim(found))
    return Report("rare_rounds", "Rare rounds", tuple(rows), (_conditions(),), plot(found, ALONE))


def _outcome(job: tuple[str, int]) -> Outcome:
    name, seed = job
    texts, start = prepared(seed)
    if name == ALONE:
        return apart(texts, start, STEPS, BATCH)
    outer = TOGETHER[name]
    return together(texts, start, Scheme(outer, STEPS // outer.inner_steps, REPLICAS))


def _aim(found: Mapping[str, Sequence[Outcome]]) -> Row:
    """The fewest bits without more loss than rounds in fp32, and than no rounds, by the mean of the seeds."""
    loss = {name: fmean(way.loss for way in ways) for name, ways in found.items()}
    most = min(loss[PLAIN], loss[ALONE])
    enough = {fmean(way.bits for way in found[name]): name for name in TOGETHER if loss[name] <= most}
    item = f"fewest bits at no more loss than {PLAIN}, and than one alone"
    if not enough:
        return Row(item, "none", f"<= {AIM}", met=False)
    bits = min(enough)
    return Row(item, f"{bits:.4f} ({enough[bits]})", f"<= {AIM}", bits <= AIM)


def _conditions() -> str:
    return (
        f"{REPLICAS} replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one of them, for "
        f"{STEPS:,} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books each. Held-out loss of the last "
        f"anchor, nats a byte, on {HELD_OUT} windows; ± between seeds {', '.join(map(str, SEEDS))} for weights and "
        "data, of differences between pairs of one seed. Bits: what a member sends, of a parameter and inner step, "
        "from the lengths of the encoded slices, as in the table of schemes. Streaming: a quarter of the layers in "
        "each round, four rounds in so many inner steps. Eight rounds of 500 inner steps end worse than one replica "
        "alone, in any codec (most likely the outer momentum overshoots at first, and they are too few to come back): "
        "a weak measure for the others, which is why one alone is a measure, too."
    )
