"""Exact softmax attention that can be differentiated twice in O(N) memory.

    from flashbob import sdpa_bob

Everything public is here: `sdpa_bob`, the choice of its backend (`set_backend`, `get_backend`, `resolve_backend`,
`BACKENDS`) and, in `flashbob.operators`, the three operators that it is made of.
"""

from .attention import BACKENDS, get_backend, resolve_backend, sdpa_bob, set_backend

__all__ = ["BACKENDS", "get_backend", "resolve_backend", "sdpa_bob", "set_backend"]
__version__ = "0.1.0"
