"""Agreement of a stage's replicas: matchmaking, certified rounds, votes, and the outer step of each sync strategy.

A round is certified: its members agree, bit for bit, on one aggregate, although some are slow, dead or hostile."""
