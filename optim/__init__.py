"""Optimizers and the curvature that they need: usable with any model and any loop.

    from optim import HutchinsonEstimator, SophiaH

docs/optimizer.md has an example with a foreign model.
"""

from .adamw import build_adamw, parameter_groups
from .hutchinson import HutchinsonEstimator, probe
from .hvp import HessianVectorProduct, hessian_vector_product
from .recomputation import recompute
from .sophia import SophiaH
from .zero import ShardedParameters

__all__ = [
    "HessianVectorProduct",
    "HutchinsonEstimator",
    "ShardedParameters",
    "SophiaH",
    "build_adamw",
    "hessian_vector_product",
    "parameter_groups",
    "probe",
    "recompute",
]
