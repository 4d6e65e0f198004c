"""Rewrites of a traced Hessian-vector product, before `torch.compile` takes it. Each leaves alone what it does not recognise.

`PASSES` holds those that run, in this order; without one of them the pass is slower and its result the same, up to rounding.
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import flashbob  # noqa: F401  registers its operators

aten = torch.ops.aten

# Not a `torch.library.custom_op`, whose calls cost the host more: a pass of twelve layers makes 96.
torch.library.define("flashbob_optim::add_product_", "(Tensor(a!) total, Tensor x, Tensor w) -> ()")


@torch.library.impl("flashbob_optim::add_product_", "CompositeExplicitAutograd")
def _add_product_(total: Tensor, x: Tensor, w: Tensor) -> None:
    """total [m, n] += x [m, k] w [k, n], by one matrix product: summed in fp32 with what total held, rounded once."""
    total.addmm_(x, w)


@torch.library.register_fake("flashbob_optim::add_product_")
def _(total, x, w):
    return None


def add_embeddings_in_place(graph: Graph) -> None:
    """In a + (gradient of an embedding), as a tied weight has it, add the rows to a: no zeros to add them to, and to a."""
    for node in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        arguments: Any = node.args
        rows, index, _, padding, by_frequency = arguments
        add = next(iter(node.users))
        if len(node.users) > 1 or add.target != aten.add.Tensor or add.kwargs or padding >= 0 or by_frequency:
            continue
        others = [x for x in add.args if x is not node]
        if len(others) != 1 or not isinstance(others[0], Node):
            continue
        a, embedding = others[0].meta["val"], node.meta["val"]
        if (a.shape, a.dtype) != (embedding.shape, embedding.dtype):
            continue
        with graph.inserting_before(add):
            total = graph.call_function(aten.index_put.default, (others[0], [index], rows, True))
        total.meta = dict(add.meta)
        add.replace_all_uses_with(total)
        graph.erase_node(add)
        graph.erase_node(node)


def add_products_in_place(graph: Graph) -> None:
    """Sums of matrix products, x₁ w₁ + x₂ w₂ (+ a bias for all rows), by products that add to what is there.

    Inductor makes addmm(x₁ w₁, x₂, w₂) of such a sum where no elementwise kernel reads it
    (`torch/_inductor/fx_passes/post_grad.py`, `is_valid_addmm_fusion`), and PyTorch copies the first argument into the result
    before the product, a bias that was expanded as well. Where a kernel does read it, that kernel reads both products. In
    place, the later product reads the earlier one and nothing is copied. In narrow dtypes the earlier product and the sum
    are rounded, as with Inductor's addmm; where a kernel added them, it was both products.

    Left alone is a sum whose earlier product has another reader, and what autograd adds as transposes: weight gradients.
    """
    for outer in graph.find_nodes(op="call_function", target=aten.t.default):
        inner: Any = outer.args[0]
        if inner.target == aten.t.default:  # autograd leaves such pairs around products
            outer.replace_all_uses_with(inner.args[0])
    graph.eliminate_dead_code()
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = [x for x in add.args if isinstance(x, Node) and _like(x) == _like(add)]
        products = [x for x in terms if x.target == aten.mm.default and len(x.users) == 1]
        if add.kwargs or len(terms) < 2 or not products:
            continue
        product = max(products)  # the later one
        other: Any = terms[terms.index(product) - 1]
        if (
            other.target in (aten.mm.default, aten.addmm.default)
            and len(other.users) == 1
            and other < product
        ):
            with graph.inserting_before(product):
                graph.call_function(torch.ops.flashbob_optim.add_product_.default, (other, *product.args))
            total = other
        elif _is_expanded_row(other):
            with graph.inserting_before(add):
                bias = graph.call_function(aten.reshape.default, (other.args[0], [-1]))
                total = graph.call_function(aten.addmm.default, (bias, *product.args))
            total.meta = dict(add.meta)
        else:
            continue
        add.replace_all_uses_with(total)
        graph.erase_node(add)
        graph.erase_node(product)


def _like(node: Node) -> tuple:
    return node.meta["val"].shape, node.meta["val"].dtype


def _is_expanded_row(node: Any) -> bool:
    if node.target != aten.expand.default:
        return False
    row, width = node.args[0].meta["val"].shape, node.meta["val"].shape[-1]
    return row in ((width,), (1, width))


_backward = torch.ops.flashbob.backward.default
_backward_packed = torch.ops.flashbob.backward_packed.default
_second = torch.ops.flashbob.backward_backward.default
_second_packed = torch.ops.flashbob.backward_backward_packed.default


def pack_qkv_gradients(graph: Graph) -> None:
    """Attention's gradients of q, k, v are written where they would be stacked: [B, N, 3, H, d], a packed projection's gradient.

    `backward` and `backward_backward` become `backward_packed` and `backward_backward_packed`. Where it is the sums of two
    operators' gradients that are stacked, as H z has them, a first backward adds the other's to its own before it rounds.

    Left alone are q and k of different shapes, backends that are baselines, and gradients that have other readers; but second
    backwards may read dQ, which is a view then.
    """
    for stack in graph.find_nodes(op="call_function", target=aten.stack.default):
        gradients = _stacked(stack)
        if not gradients:
            continue
        if all(x.target == aten.add.Tensor and len(x.users) == 1 and not x.kwargs for x in gradients):
            # First backwards behind: they can add.
            terms = [*zip(*(sorted(x.args, key=lambda y: _is_of(y, _backward)) for x in gradients))]
        else:
            terms = [gradients]
        operators: list[Any] = [_operator_of(x, alone=len(terms) > 1) for x in terms]
        if None in operators or any(x.target != _backward for x in operators[1:]):
            continue
        packed: Any = None
        for operator, place in zip(operators, (operators[0], stack)):
            with graph.inserting_before(place):
                packed = _pack(graph, operator, packed)
        packed.meta = dict(stack.meta)
        stack.replace_all_uses_with(packed)
    graph.eliminate_dead_code()


def _stacked(stack: Node) -> list[Any]:
    """The three [B, H, N, d] that are stacked to [B, N, 3, H, d], and nothing where it is something else."""
    parts: Any = stack.args[0]
    ours = (
        len(parts) == 3
        and stack.args[1:] == (2,)
        and all(x.target == aten.transpose.int and x.args[1:] == (1, 2) and len(x.users) == 1 for x in parts)
    )
    return [x.args[0] for x in parts] if ours else []


def _is_of(gradient: Any, *targets: Any) -> bool:
    if not isinstance(gradient, Node) or gradient.target != getitem:
        return False
    source: Any = gradient.args[0]
    return source.target in targets


def _operator_of(gradients: Sequence[Any], alone: bool) -> Any:
    """The operator whose gradients of q, k, v these are, or None. They are read once and, unless alone, by second backwards."""
    if len(gradients) != 3 or not all(_is_of(x, _backward, _second) for x in gradients):
        return None
    operator = gradients[0].args[0]
    allowed = () if alone else (_second, _second_packed)
    ours = (
        [x.args for x in gradients] == [(operator, i) for i in range(3)]
        and len({x.meta["val"].shape for x in gradients}) == 1
        and operator.args[-1] in ("auto", "fused", "triton", "tiled")
        and all(sum(y.target not in allowed for y in _readers(x)) == 1 for x in gradients)
    )
    return operator if ours else None


def _readers(node: Node) -> list[Node]:
    """The nodes that read it, detached or not."""
    return [y for x in node.users for y in (_readers(x) if x.target == aten.detach.default else [x])]


def _pack(graph: Graph, operator: Any, base: Node | None) -> Node:
    """The packed gradients of `operator`, or their sum with `base`. Who else reads the operator's results gets views of them."""
    if base is not None:
        return graph.call_function(_backward_packed, (base, *operator.args))
    if operator.target == _backward:
        packed = graph.call_function(_backward_packed, (None, *operator.args))
        replacements = []
    else:
        both = graph.call_function(_second_packed, operator.args)
        packed = graph.call_function(getitem, (both, 0))
        replacements = [graph.call_function(getitem, (both, 1))]
    for index in (2, 1, 0):
        part = graph.call_function(aten.select.int, (packed, 2, index))
        replacements.append(graph.call_function(aten.transpose.int, (part, 1, 2)))
    replacements.reverse()
    for result in list(operator.users):
        replacement = replacements[result.args[1]]
        replacement.meta = dict(result.meta)
        result.replace_all_uses_with(replacement)
    return packed


# Tests and measurements take a pass out of here.
PASSES: list[Callable[[Graph], None]] = [add_embeddings_in_place, pack_qkv_gradients, add_products_in_place]
