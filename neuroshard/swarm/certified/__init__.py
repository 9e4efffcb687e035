"""The certified round: replicas agree, bit for bit, on one aggregate, although some are slow, dead or hostile.

The protocol is a pure state machine; docs/ROUNDS.md explains it with its safety argument.
"""
