"""The transformer, the family of its sizes, and what they need in memory; nothing here is written or sent."""
