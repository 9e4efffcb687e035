"""Runs: creating, finding, joining and pinning them."""
