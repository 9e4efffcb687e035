"""Measurements: ratios taken in one run, written to benchmarks/results and summed up in RESULTS.md."""
