"""Activation checkpointing that lasts through a Hessian-vector product, and with it compilation block by block.

A block y = f(x, θ) that is recomputed keeps (x, θ) and nothing else. Its backward, vjp f: (ȳ, x, θ) → (x̄, θ̄), runs the
block again and keeps (ȳ, x, θ); that one's backward, vjp (vjp f), runs it once more. Of a stack of L blocks a
Hessian-vector product then holds L inputs and L cotangents, and the activations of one block at a time.

`torch.utils.checkpoint` is for one derivative: with `create_graph=True` its backward puts every block's activations
back on the tape, so that a Hessian-vector product takes as much memory as without it.

Traced by `make_fx` (a compiled `HessianVectorProduct`), each of f, vjp f and vjp (vjp f) is one operator of the outer graph:
no compiler can merge a recomputation with what it repeats. Each is compiled once, and blocks whose traces are equal
share the result.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

import flashbob

from .closed_forms import INDUCTOR_OPTIONS, register_lowerings


def recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`block(*args, **kwargs)`, with the block's inputs as all that is kept for its derivatives, of any order.

        for block in model.blocks:
            x = recompute(block, x)

    `args`, `kwargs` and the result are tensors in any nesting of tuples, lists and dictionaries; what else is among them is
    constant. The result and its derivatives are those of the plain call: autocast, flashbob's backend and, in eager
    mode, the state of the random generators are restored for each recomputation. The block may hold tied and frozen
    parameters. It must not change its inputs or buffers, which a recomputation would do again, and its forward hooks
    run with each recomputation.

    Under `torch.compile`, which differentiates once, this is `torch.utils.checkpoint`. A block that draws random numbers
    (dropout) cannot be traced by `make_fx`; `HessianVectorProduct` then runs eagerly, with a warning.

    Raises ValueError for a block that changes a buffer, RuntimeError for a trace of one that draws random numbers,
    NotImplementedError for tangents (forward mode).
    """
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    call = _Call(block, args, kwargs)
    return call.result(_Recomputed.apply(call, *call.tensors))


class _Call:
    """One call of a block as a function of tensors: its parameters, buffers and arguments."""

    def __init__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._block = block
        # As they are now: under `functional_call` others than later.
        held = dict(block.named_parameters()) | dict(block.named_buffers())
        self._names = list(held)
        self._leaves, self._structure = tree_flatten((args, kwargs))
        self._positions = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [*held.values(), *(self._leaves[i] for i in self._positions)]
        for i in self._positions:
            self._leaves[i] = None
        self._device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._autocast = torch.is_autocast_enabled(self._device.type)
        self._autocast_dtype = torch.get_autocast_dtype(self._device.type)
        self._backend = flashbob.get_backend()
        self._random_state: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        held = dict(zip(self._names, tensors))
        leaves = list(self._leaves)
        for i, x in zip(self._positions, tensors[len(held) :]):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self._structure)
        buffers = [(name, held[name], held[name]._version) for name, _ in self._block.named_buffers()]
        with ExitStack() as stack:
            # Casts are not cached: the cache would keep those of every recomputation until the user's region ends.
            stack.enter_context(
                torch.autocast(self._device.type, self._autocast_dtype, self._autocast, cache_enabled=False)
            )
            stack.enter_context(flashbob.set_backend(self._backend))
            if get_proxy_mode() is None:
                self._repeat_random_numbers(stack)
            result = torch.func.functional_call(self._block, held, args, kwargs)
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise ValueError(
                    f"{type(self._block).__name__} changes its buffer {name}, and would again when it is recomputed; "
                    "recompute blocks that do not"
                )
        outputs, self._result_structure = tree_flatten(result)
        self._others = [None if isinstance(x, Tensor) else x for x in outputs]
        self._is_tensor = [isinstance(x, Tensor) for x in outputs]
        return tuple(x for x in outputs if isinstance(x, Tensor))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the block returned, with these tensors in it."""
        remaining = iter(tensors)
        leaves = [next(remaining) if tensor else x for tensor, x in zip(self._is_tensor, self._others)]
        return tree_unflatten(leaves, self._result_structure)

    def _repeat_random_numbers(self, stack: ExitStack) -> None:
        """The first run draws from the default generators; later ones draw the same and leave them as they were."""
        cuda = self._device.type == "cuda"
        if self._random_state is None:
            self._random_state = (
                torch.get_rng_state(),
                torch.cuda.get_rng_state(self._device) if cuda else None,
            )
            return
        stack.enter_context(torch.random.fork_rng([self._device.index] if cuda else []))
        torch.set_rng_state(self._random_state[0])
        if self._random_state[1] is not None:
            torch.cuda.set_rng_state(self._random_state[1], self._device)


class _VectorJacobianProduct:
    """vjp f: (cotangents of f's outputs, f's inputs) → gradients of those inputs that need one, each a tensor or None."""

    def __init__(self, function: Callable[..., tuple], needed: Sequence[bool], outputs: int) -> None:
        self._function = function
        self._needed = needed
        self._outputs = outputs

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        cotangents, inputs = tensors[: self._outputs], tensors[self._outputs :]
        twice = (
            torch.is_grad_enabled()
        )  # inside the recomputation of a further derivative, whose inputs are leaves
        inputs = [
            x.detach().requires_grad_() if n and not x.requires_grad else x  # type: ignore[union-attr]
            for x, n in zip(inputs, self._needed)
        ]
        with torch.enable_grad():
            outputs = self._function(*inputs)
        pairs = [
            (y, c) for y, c in zip(outputs, cotangents) if c is not None and y is not None and y.requires_grad
        ]
        if not pairs:
            return (None,) * sum(self._needed)
        # Autocast is the block's, not its derivatives'.
        with torch.autocast(pairs[0][0].device.type, enabled=False):
            return torch.autograd.grad(
                [y for y, _ in pairs],
                [x for x, n in zip(inputs, self._needed) if n],  # type: ignore[misc]
                [c for _, c in pairs],
                create_graph=twice,
                allow_unused=True,
            )


class _Recomputed(Function):
    """A function of tensors that keeps its inputs only. Its backward is one too: of the vector-Jacobian product."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        # Without their graph, or autocast would keep a cast of a parameter that has none.
        inputs = [x if x is None else x.detach() for x in inputs]
        outputs = function(*inputs) if get_proxy_mode() is None else _as_operator(function, inputs)
        ctx.outputs = len(outputs)
        ctx.mark_non_differentiable(
            *(y for y in outputs if y is not None and not y.is_floating_point() and not y.is_complex())
        )
        return outputs

    @staticmethod
    def backward(ctx, *cotangents):
        needed = ctx.needs_input_grad[1:]
        product = _VectorJacobianProduct(ctx.function, needed, ctx.outputs)
        gradients = iter(_Recomputed.apply(product, *cotangents, *ctx.saved_tensors))
        return None, *(next(gradients) if n else None for n in needed)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "recompute has no forward mode: call the block itself, or take Hessian-vector products with method='reverse'"
        )


# --- under make_fx: one operator, compiled on its own -----------------------------------------------------------------

_stages: dict[str, "_Stage"] = {}  # by a digest of their graph and of what their inputs are like


class _Stage:
    """A traced function of tensors, compiled at its first call."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        register_lowerings()
        self.compiled = torch.compile(graph, dynamic=False, options=INDUCTOR_OPTIONS)
        outputs = graph.graph.output_node().args[0]
        self.outputs_like = _like([node.meta["val"] for node in outputs])  # type: ignore[union-attr]


def _like(tensors: Sequence[Tensor]) -> list[tuple]:
    return [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in tensors]


def _as_operator(function: Callable, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`function(*inputs)`, traced by itself and put into the outer trace as one operator."""
    given = [i for i, x in enumerate(inputs) if x is not None]
    present: list[bool] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        all_inputs: list[Tensor | None] = [None] * len(inputs)
        for i, x in zip(given, tensors):
            all_inputs[i] = x
        outputs = function(*all_inputs)
        present[:] = [y is not None for y in outputs]
        # An operator returns memory of its own.
        mine = {x.untyped_storage()._cdata for x in tensors}
        fresh = []
        for y in outputs:
            if y is not None:
                y = y.detach()
                y = y.clone() if y.untyped_storage()._cdata in mine else y
                mine.add(y.untyped_storage()._cdata)
                fresh.append(y)
        return fresh

    tensors = [x for x in inputs if x is not None]
    with disable_proxy_modes_tracing():
        graph = make_fx(run, tracing_mode="fake")(*tensors)
    constants = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constants.append(id(getattr(graph, node.target)))  # which the code does not show
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RuntimeError(
                f"a recomputed block draws random numbers ({node.target}), which a trace cannot repeat"
            )
    key = hashlib.sha256(f"{graph.code}{_like(tensors)}{constants}".encode()).hexdigest()
    if key not in _stages:
        _stages[key] = _Stage(graph)
    results = iter(_stage(key, tensors))
    return tuple(next(results) if there else None for there in present)


@torch.library.custom_op("flashbob_optim::stage", mutates_args=())
def _stage(key: str, inputs: list[Tensor]) -> list[Tensor]:
    # The graph has the block's casts already; the caller's autocast must not round its products again.
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        return list(_stages[key].compiled(*inputs))


@_stage.register_fake
def _(key, inputs):
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for shape, stride, dtype, device in _stages[key].outputs_like
    ]
