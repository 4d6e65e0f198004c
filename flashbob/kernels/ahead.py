"""Compiling a problem's derivatives while its forward compiles: five kernels one after the other take 6 to 9 s."""

import contextlib

import torch
from torch import Tensor

from .backward import backward
from .column_pass import column_pass
from .common import INTERPRETED, Problem
from .launch import NUM_COMPILERS, compiling_ahead
from .row_pass import NUM_VECTORS, row_pass

_KINDS: set[tuple] = set()


def compile_derivatives(problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> None:
    """Start compiling both backwards of a new kind of problem in other threads; none of it is launched.

    What is not known yet is taken to be the usual: gradients in the layouts of q, k and v, and a cotangent for each of them.
    Where that is wrong the call itself compiles, as it does after an error here.
    """
    if INTERPRETED or NUM_COMPILERS < 2 or torch.cuda.is_current_stream_capturing():
        return
    kind = (
        problem.head_dim, problem.dtype, problem.device, problem.heads == problem.kv_heads, problem.is_causal,
        problem.window_size is None, problem.key_padding_mask is None, problem.dropout_seed is None,
    )  # fmt: skip
    if kind in _KINDS:
        return
    _KINDS.add(kind)
    with contextlib.suppress(Exception), compiling_ahead():
        vectors = problem.row_vectors(NUM_VECTORS)
        row_pass(problem, q, k, v, q, q, k, v, q, lse, q)
        column_pass(problem, q, k, v, q, q, k, v, vectors)  # the slowest ones first
        backward(problem, q, q, k, v, q, lse)
