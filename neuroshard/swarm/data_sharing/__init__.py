"""Nodes of a run give each other the files of its data set: cached shards, and what describes them."""
