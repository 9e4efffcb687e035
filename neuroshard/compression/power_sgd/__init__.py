"""PowerSGD: matrices of a gradient travel as two thin factors, whose product is their best part (Vogels et al. 2019).

A step has two phases. P = M Q of all members is averaged and orthonormalised, which gives a basis; M^T basis of all
members is averaged, beside what is not worth compressing, and gives the gradient: basis * average^T. That average is
the Q of the next step, so the basis follows the gradient's largest directions from step to step.
"""

from neuroshard.compression.power_sgd.factors import (
    first_right,
    left_factors,
    next_right,
    orthonormal_basis,
    projection,
    restored,
)
from neuroshard.compression.power_sgd.plan import FactorPlan, Matrix

__all__ = [
    "FactorPlan",
    "Matrix",
    "first_right",
    "left_factors",
    "next_right",
    "orthonormal_basis",
    "projection",
    "restored",
]
