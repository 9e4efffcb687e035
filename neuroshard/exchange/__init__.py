"""Data set files, such as shards and their descriptions, exchanged between the nodes of a run."""
