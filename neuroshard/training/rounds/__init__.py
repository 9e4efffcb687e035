"""Rounds of a stage's replicas: who takes part in one and when it begins, and how its messages travel."""
