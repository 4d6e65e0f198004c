"""Hessian-vector products of a model."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch._inductor
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import flashbob

from .closed_forms import INDUCTOR_OPTIONS, ClosedForms, register_lowerings
from .graph_passes import PASSES


def hessian_vector_product(
    loss: Tensor, params: Sequence[Tensor], vectors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient g = ∇L and the product H z = ∇⟨g, z⟩, by differentiating twice (Pearlmutter 1994).

    `loss` is a scalar with its graph, which is used up: no further gradient can be taken from it. `vectors`
    is z, each like its parameter in shape, dtype and device. Returns (gradients, products), both detached,
    each like its parameter; where the loss does not depend on a parameter, or only linearly, zeros.

    Raises ValueError for a loss that is no scalar or has no graph, for parameters that are missing,
    repeated, not floating point or do not require a gradient, and for vectors that do not match. An
    operation that cannot be differentiated twice (PyTorch's fused attention, for one) raises PyTorch's own
    error.
    """
    _check_loss(loss)
    check_parameters(params)
    check_vectors(params, vectors)
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    # A gradient without a graph is constant: it adds nothing to the product.
    curved = [(g, z) for g, z in zip(gradients, vectors) if g is not None and g.requires_grad]
    products: Sequence[Tensor | None] = [None] * len(params)
    if curved:
        outputs, cotangents = zip(*curved)
        products = torch.autograd.grad(outputs, params, cotangents, allow_unused=True)
    return (
        [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(gradients, params)],
        [torch.zeros_like(p) if hz is None else hz for hz, p in zip(products, params)],
    )


class HessianVectorProduct:
    """Loss, gradient and H z of a model in one pass, eager or compiled.

        hvp = HessianVectorProduct(model, lambda model, tokens, targets: model(tokens, targets)[1])
        loss, gradients, products = hvp(vectors, tokens, targets)

    `loss(model, *batch)` returns a scalar; `batch` are tensors. `vectors`, the result's gradients and products have one
    tensor for each of `params`, in their order: by default the model's that require a gradient, tied ones once.

    `method` says how the gradient is differentiated. "reverse": by a second backward (reverse over reverse). "forward": by
    tangents, which the forward and the backward pass carry along (forward over reverse); no graph of the gradient is kept. Every
    operation of the model then needs a forward-mode derivative of itself and of its backward; PyTorch names the one that
    lacks it.

    Compiled, either is traced with `make_fx` into one forward graph, which `torch.compile` takes (double backward and `jvp`
    themselves it refuses), once for each new shape of the batch. The traced graph is exact: the same operations in the same
    dtypes, autocast included. `on_new_shape="eager"` answers shapes that `prepare` has not seen eagerly instead of stopping to
    compile. A model that cannot be traced falls back to eager with one warning.

    Traced in reverse mode, LayerNorm and GELU (tanh) have their second derivatives in closed form (`optim/closed_forms.py`).
    `mode` and `options` are torch.compile's.

    `cuda_graph=True` replays the compiled pass as one CUDA graph: no time between its kernels. Parameters and buffers are read
    where they are; vectors and batch are copied in. The graph keeps the memory of a pass to itself, and the results are
    overwritten by the next call with the same shape. Vectors that are filled in place are not copied:

        vectors = hvp.empty_vectors(tokens, targets)  # the graph's own, once there is one
        for v in vectors: v.normal_()
        loss, gradients, products = hvp(vectors, tokens, targets)  # leaves the vectors as they are

    The trace holds what was true when it was made: the training flag, autocast, and flashbob's backend are part of
    the cache's key. Random operations are Inductor's: dropout masks differ from eager ones. Buffers that the model
    changes (batch normalization) are not written back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        *,
        params: Iterable[Tensor] | None = None,
        compile: bool = True,
        on_new_shape: Literal["compile", "eager"] = "compile",
        method: Literal["reverse", "forward"] = "reverse",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        cuda_graph: bool = False,
    ) -> None:
        if on_new_shape not in ("compile", "eager"):
            raise ValueError(f"on_new_shape must be 'compile' or 'eager', got {on_new_shape!r}")
        if method not in ("reverse", "forward"):
            raise ValueError(f"method must be 'reverse' or 'forward', got {method!r}")
        self.model = model
        self.compile = compile
        self.method = method
        self.on_new_shape = on_new_shape
        mode_options = torch._inductor.list_mode_options(mode) if mode else {}  # of "max-autotune", …
        self.options = {**INDUCTOR_OPTIONS, **mode_options, **(options or {})}
        self.cuda_graph = cuda_graph
        self._with_loss = _WithLoss(model, loss)
        name_of: dict[Tensor, str] = {
            p: f"model.{name}" for name, p in model.named_parameters() if p.requires_grad
        }
        self.params = list(name_of if params is None else params)
        check_parameters(self.params)
        if cuda_graph and (not compile or self.params[0].device.type != "cuda"):
            raise ValueError(
                f"cuda_graph=True needs compile=True and parameters on a CUDA device, got compile={compile} and "
                f"parameters on {self.params[0].device}"
            )
        foreign = [index for index, p in enumerate(self.params) if p not in name_of]
        if foreign:
            raise ValueError(f"params[{foreign[0]}] is not a parameter of {type(model).__name__}")
        self._names = [name_of[p] for p in self.params]
        # What else the model holds: parameters that are not differentiated, and buffers.
        held = [*model.named_parameters(), *model.named_buffers()]
        mine = set(self.params)
        self._constants = {f"model.{name}": x for name, x in held if x not in mine}
        self._graphs: dict[tuple, Callable] = {}
        self.trace_s: list[float] = []  # seconds of each trace
        self.compile_s: list[float] = []  # seconds of each first call, which compiles

    def __call__(
        self, vectors: Sequence[Tensor], *batch: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(loss, gradients, products), detached. Raises ValueError as `hessian_vector_product` does."""
        check_vectors(self.params, vectors)
        if self.compile:
            key = self._key(batch)
            if key not in self._graphs and self.on_new_shape == "compile":
                self.prepare(vectors, *batch)
            if key in self._graphs:
                with torch.no_grad():
                    outputs = self._graphs[key](*self._inputs(vectors, batch))
                return _split(outputs, len(self.params))
        return self._differentiate(self.params, vectors, {}, batch)

    def empty_vectors(self, *batch: Tensor) -> list[Tensor]:
        """Vectors for the caller to fill, each like its parameter, for a call with a batch like this one.

        With a CUDA graph for this batch (of the same autocast and backend) they are the tensors that it reads: the same at every
        call, in memory like the vectors of its first; give them back in this order. Otherwise they are new and contiguous.
        """
        graph = self._graphs.get(self._key(batch)) if self.compile else None
        if isinstance(graph, _Replay):
            return graph.inputs[len(self.params) : 2 * len(self.params)]
        return [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.params]

    def prepare(self, vectors: Sequence[Tensor], *batch: Tensor) -> None:
        """Trace and compile for batches like this one."""
        key = self._key(batch)
        if not self.compile or key in self._graphs:
            return
        inputs = self._inputs(vectors, batch)
        start = time.perf_counter()
        try:
            graph = self._trace(inputs)
        except Exception as error:
            warnings.warn(
                f"Hessian-vector products of {type(self.model).__name__} run eagerly: it cannot be traced "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
                stacklevel=3,
            )
            self.compile = False
            return
        self.trace_s.append(time.perf_counter() - start)
        register_lowerings()
        compiled = torch.compile(graph, dynamic=False, options=self.options)
        start = time.perf_counter()
        with torch.no_grad():
            compiled(*inputs)
        self.compile_s.append(time.perf_counter() - start)
        if self.cuda_graph:
            count = len(self.params)
            fixed = [*range(count), *range(2 * count, 2 * count + len(self._constants))]
            compiled = _Replay(compiled, inputs, frozenset(fixed))
        self._graphs[key] = compiled

    def _trace(self, inputs: Sequence[Tensor]) -> GraphModule:
        graph = make_fx(self._second_order, tracing_mode="fake")(*inputs)
        # Forward mode leaves two checks behind for each tangent, whose results, Python's booleans, nobody reads; torch.compile
        # would break the graph at every one, and compile for hours.
        graph.graph.eliminate_dead_code()
        for rewrite in PASSES:
            rewrite(graph.graph)
        graph.recompile()
        return graph

    def _inputs(self, vectors: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
        return [*self.params, *vectors, *self._constants.values(), *batch]

    def _second_order(self, *inputs: Tensor) -> list[Tensor]:
        count = len(self.params)
        vectors, rest = inputs[count : 2 * count], inputs[2 * count :]
        constants, batch = dict(zip(self._constants, rest)), rest[len(self._constants) :]
        params = [p.detach().requires_grad_() for p in inputs[:count]]
        with ClosedForms() if self.method == "reverse" else nullcontext():
            loss, gradients, products = self._differentiate(params, vectors, constants, batch)
        return [loss, *gradients, *products]

    def _differentiate(
        self,
        params: Sequence[Tensor],
        vectors: Sequence[Tensor],
        constants: dict[str, Tensor],
        batch: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """At `params` and `constants` in place of the model's own tensors of those names."""

        def loss_at(params: Sequence[Tensor]) -> Tensor:
            if params is self.params:
                return self._with_loss(*batch)
            values = dict(zip(self._names, params)) | constants
            return torch.func.functional_call(self._with_loss, values, tuple(batch))

        # Autocast is for the forward pass: its choices are in the graph, and derivatives must not be rounded again.
        no_autocast = torch.autocast(self.params[0].device.type, enabled=False)
        if self.method == "reverse":
            loss = loss_at(params)
            with no_autocast:
                gradients, products = hessian_vector_product(loss, params, vectors)
            return loss.detach(), gradients, products
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, z) for p, z in zip(params, vectors)]
            loss = loss_at(duals)
            _check_loss(loss)
            with no_autocast:
                along = torch.autograd.grad(loss, duals, allow_unused=True)
            pairs = [(None, None) if g is None else forward_ad.unpack_dual(g) for g in along]
            loss = forward_ad.unpack_dual(loss).primal.detach()
        gradients, products = (
            [torch.zeros_like(p) if x is None else x.detach() for x, p in zip(part, params)]
            for part in zip(*pairs)
        )
        return loss, gradients, products

    def _key(self, batch: Sequence[Tensor]) -> tuple:
        device = self.params[0].device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        like = tuple((x.shape, x.stride(), x.dtype, x.device) for x in batch)
        return like, tuple(m.training for m in self.model.modules()), autocast, flashbob.get_backend()


class _Replay:
    """A function of CUDA tensors as one CUDA graph. Inputs at the places `fixed` are read where they are, others copied in.

    `inputs` are the tensors that it reads. They stay the same but for `fixed` ones; a call with them copies nothing.
    """

    def __init__(self, function: Callable, inputs: Sequence[Tensor], fixed: frozenset[int]) -> None:
        self._function = function
        self._fixed = fixed
        self._addresses: list[int] = []
        self.inputs = [x if i in fixed else x.clone() for i, x in enumerate(inputs)]
        self._outputs: Sequence[Tensor] = ()
        self._capture(inputs)

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if [inputs[i].data_ptr() for i in sorted(self._fixed)] != self._addresses:
            self._capture(inputs)  # a parameter has moved: its data were replaced, not written
        copied = [
            (own, x)
            for i, (own, x) in enumerate(zip(self.inputs, inputs))
            if i not in self._fixed and own is not x
        ]
        if copied:
            to, values = map(list, zip(*copied))
            torch._foreach_copy_(to, values)  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self._outputs = ()  # of an earlier capture, whose memory this one can take
        self._addresses = [inputs[i].data_ptr() for i in sorted(self._fixed)]
        self.inputs = [x if i in self._fixed else self.inputs[i] for i, x in enumerate(inputs)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            self._function(*self.inputs)  # libraries make their workspaces for this stream
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._outputs = self._function(*self.inputs)


class _WithLoss(nn.Module):
    """The loss as a module, so that `functional_call` can put other parameters into the model."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


def _split(outputs: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    loss, *rest = outputs
    return loss, rest[:count], rest[count:]


def _check_loss(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError("loss must have a graph, got a tensor that does not require a gradient")


def check_vectors(params: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    """Raise ValueError unless `vectors` are like `params`, one by one."""
    if len(vectors) != len(params):
        raise ValueError(f"vectors must be one for each of the {len(params)} parameters, got {len(vectors)}")
    for index, (vector, p) in enumerate(zip(vectors, params)):
        if (vector.shape, vector.dtype, vector.device) != (p.shape, p.dtype, p.device):
            raise ValueError(
                f"vectors[{index}] must be like its parameter, {_describe(p)}, got {_describe(vector)}"
            )


def check_parameters(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless `params` are distinct floating-point tensors that require a gradient."""
    if not params:
        raise ValueError("params must hold at least one parameter, got none")
    first_index: dict[int, int] = {}
    for index, p in enumerate(params):
        if not p.is_floating_point():
            raise ValueError(f"params[{index}] must be floating point, got {p.dtype}")
        if not p.requires_grad:
            raise ValueError(
                f"params[{index}] must require a gradient, got one that does not ({_describe(p)})"
            )
        if first_index.setdefault(id(p), index) != index:
            raise ValueError(
                f"params[{index}] is the same tensor as params[{first_index[id(p)]}]; give it once"
            )


def _describe(x: Tensor) -> str:
    return f"shape {tuple(x.shape)} {x.dtype} on {x.device}"
