"""The populator: streams sources through vocabulary and tokeniser into shards, and goes on where it was left."""

from neuroshard.genesis.population.feed import stopped
from neuroshard.genesis.population.population import PopulationOptions, PopulationReport, Surroundings, populate
from neuroshard.genesis.population.progress import ProgressPrinter

__all__ = [
    "PopulationOptions",
    "PopulationReport",
    "ProgressPrinter",
    "Surroundings",
    "populate",
    "stopped",
]
