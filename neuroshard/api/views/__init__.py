"""Pure functions from a snapshot to the answers of the API."""
