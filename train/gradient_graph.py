"""A micro-batch's forward and backward pass as one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class GradientGraph:
    """`add_gradient(tokens, targets)`, which adds a micro-batch's gradient to the parameters' `.grad` and returns its loss,
    replayed as one CUDA graph: the host launches one graph instead of every kernel.

    A first call with a shape of batch runs eagerly (what is compiled, is compiled then), the second captures and replays; all
    of them do the same work, in the same order of sums. Parameters and `.grad` are read and written where they are: zero
    gradients in place. Where one of them has moved, the next call runs eagerly, and the one after it captures anew. Each
    graph keeps the memory of a pass to itself. Random operations advance PyTorch's generator on a replay, too, though not
    always by as much as eager ones: for models without dropout.
    """

    def __init__(self, add_gradient: Callable[..., Tensor], params: Sequence[Tensor]) -> None:
        self._add_gradient = add_gradient
        self._params = list(params)
        self._addresses: list[int] = []
        self._seen: set[tuple] = set()  # shapes of batches that ran eagerly
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, *batch: Tensor) -> Tensor:
        """The loss of this micro-batch, which the next call with its shape overwrites."""
        addresses = self._addresses_now()
        if addresses != self._addresses:
            self._graphs.clear()
            self._seen.clear()
        key = tuple(x.shape for x in batch)
        if key not in self._seen:
            loss = self._on_side_stream(*batch)
            self._seen.add(key)
            self._addresses = self._addresses_now()  # a first backward pass makes the gradients
            return loss
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch)
        graph, inputs, loss = self._graphs[key]
        for static, x in zip(inputs, batch):
            static.copy_(x, non_blocking=True)
        graph.replay()
        return loss

    def _addresses_now(self) -> list[int]:
        grads = (p.grad for p in self._params)
        return [p.data_ptr() for p in self._params] + [0 if g is None else g.data_ptr() for g in grads]

    def _on_side_stream(self, *batch: Tensor) -> Tensor:
        """As PyTorch asks for before a capture: libraries make their workspaces, autograd its nodes, off the default stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._add_gradient(*batch)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, batch: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        inputs = [x.clone() for x in batch]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._add_gradient(*inputs)
        return graph, inputs, loss
