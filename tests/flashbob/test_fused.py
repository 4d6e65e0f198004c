"""The backend `fused` without a GPU: what it takes, what it leaves to `triton`, and what a changed signature does."""

import warnings

import pytest
import torch

from flashbob import operators, resolve_backend, set_backend
from flashbob.backends import fused

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    cached = fused.operator_names, operators._has_cudnn
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def capability(monkeypatch, *value):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: value)


@pytest.mark.parametrize(
    ("value", "library"), [((9, 0), "cuDNN"), ((10, 0), "cuDNN"), ((8, 6), "flash"), ((7, 5), None)]
)
def test_the_signatures_of_this_pytorch_are_those_that_the_code_expects(monkeypatch, value, library):
    capability(monkeypatch, *value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fused.operator_names(CUDA)
    assert (found and found[0]) == library


def test_a_changed_signature_falls_back_with_one_warning(monkeypatch):
    capability(monkeypatch, 9, 0)
    name = "_scaled_dot_product_cudnn_attention_backward"
    monkeypatch.setitem(fused._SCHEMAS, name, fused._SCHEMAS[name].replace("bool is_causal", "bool causal"))
    with pytest.warns(
        UserWarning, match=r"cudnn_attention_backward: its signature .* is not the one"
    ) as caught:
        assert fused.operator_names(CUDA)[0] == "flash"
    assert len(caught) == 1
    monkeypatch.setitem(fused._SCHEMAS, "_scaled_dot_product_flash_attention", "()")
    fused.operator_names.cache_clear()
    with pytest.warns(UserWarning, match="the triton backend runs instead"):
        assert fused.operator_names(CUDA) is None
        assert resolve_backend(CUDA) == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused.operator_names(CUDA) is None


def call(heads=(4, 4), lengths=(4096, 4096), head_dim=128, dtype=torch.bfloat16, **options):
    q = torch.empty(2, heads[0], lengths[0], head_dim, dtype=dtype)
    k = torch.empty(2, heads[1], lengths[1], head_dim, dtype=dtype)
    return (q, k, k), {
        "is_causal": True,
        "window_size": None,
        "key_padding_mask": None,
        "dropout_p": 0.0,
    } | options


@pytest.mark.parametrize(
    ("taken", "shape", "options"),
    [
        (True, {}, {}),
        (True, {"lengths": (10, 20)}, {"is_causal": False}),
        (False, {"lengths": (10, 20)}, {}),  # theirs is aligned to the top left
        (False, {"heads": (4, 2)}, {}),
        (False, {"head_dim": 160}, {}),
        (False, {"head_dim": 20}, {}),
        (False, {"dtype": torch.float32}, {}),
        (False, {}, {"window_size": 100}),
        (False, {}, {"dropout_p": 0.1}),
        (False, {}, {"key_padding_mask": torch.ones(2, 4096, dtype=torch.bool)}),
    ],
)
def test_what_it_takes(monkeypatch, taken, shape, options):
    monkeypatch.setattr(fused, "operator_names", lambda device: ("cuDNN", "", ""))
    tensors, options = call(**shape, **options)
    assert fused.able(*tensors, **options) == taken


class OnCuda:
    """As much of a CUDA tensor as the choice looks at."""

    is_cuda, device = True, CUDA

    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize(
    ("pass_name", "length", "head_dim", "options", "expected"),
    [
        ("forward", 16384, 128, {}, "fused"),
        ("backward", 16384, 128, {}, "fused"),
        ("backward_backward", 16384, 128, {}, "triton"),
        ("forward", 256, 64, {}, "triton"),
        ("forward", 16384, 80, {}, "triton"),
        ("forward", 16384, 128, {"window_size": 128}, "triton"),
        ("forward", 16384, 128, {"dropout_p": 0.1}, "triton"),
    ],
)
def test_the_choice_of_each_pass(monkeypatch, pass_name, length, head_dim, options, expected):
    capability(monkeypatch, 9, 0)
    options = {"window_size": None, "key_padding_mask": None, "dropout_p": 0.0} | options
    q = OnCuda(1, 2, length, head_dim)
    assert operators._choose(pass_name, (q, q, q), **options) == expected
    capability(monkeypatch, 8, 0)
    operators._has_cudnn.cache_clear()
    fused.operator_names.cache_clear()
    assert operators._choose(pass_name, (q, q, q), **options) == "triton"


def test_on_a_cpu_the_choice_is_tiled():
    q = torch.randn(1, 1, 8, 16)
    assert operators._choose("forward", (q, q, q), None, None, 0.0) == "tiled"


def test_names_for_a_log(monkeypatch):
    capability(monkeypatch, 9, 0)
    assert resolve_backend(CUDA).startswith("triton (with cuDNN's forward and backward")
    with set_backend("fused"):
        assert resolve_backend(CUDA) == "fused (cuDNN)"
    with set_backend("three_pass"):
        assert resolve_backend(CUDA) == "three_pass (forward and first backward: fused (cuDNN))"
