"""Every wrong argument gets one line that names it, its value and what is allowed, whatever the backend."""

import pytest
import torch

import flashbob
from flashbob import get_backend, resolve_backend, sdpa_bob, set_backend

q = torch.randn(2, 4, 8, 16)
WRONG = [
    ({"q": [1.0]}, TypeError, "q is a list; a tensor [B, H, N, d] is needed"),
    ({"k": None}, TypeError, "k is a NoneType; a tensor [B, H, N, d] is needed"),
    ({"q": q[0]}, ValueError, "q has shape [4, 8, 16]; four dimensions [B, H, N, d], none empty, are needed"),
    ({"k": q[:, :, :0]}, ValueError, "k has shape [2, 4, 0, 16]; four dimensions"),
    (
        {"v": q.double()},
        ValueError,
        "v is torch.float64 on cpu and q is torch.float32 on cpu; q, k and v must agree",
    ),
    ({"k": q.to("meta")}, ValueError, "k is torch.float32 on meta and q is torch.float32 on cpu"),
    ({x: q.to("meta") for x in "qkv"}, ValueError, "q is on meta; allowed are cpu, cuda"),
    (
        {x: q.int() for x in "qkv"},
        TypeError,
        "q is torch.int32; allowed on cpu are torch.bfloat16, torch.float16",
    ),
    (
        {"k": q[:1], "v": q[:1]},
        ValueError,
        "q, k, v have shapes [2, 4, 8, 16], [1, 4, 8, 16], [1, 4, 8, 16]; [B, H_q",
    ),
    ({"v": q[:, :, :5]}, ValueError, "q, k, v have shapes [2, 4, 8, 16], [2, 4, 8, 16], [2, 4, 5, 16];"),
    ({"k": q[..., :15], "v": q[..., :15]}, ValueError, "q, k, v have shapes"),
    (
        {"k": q[:, :3], "v": q[:, :3]},
        ValueError,
        "q has 4 heads and k has 3; the first must be a multiple of the second",
    ),
    ({x: q[..., :8] for x in "qkv"}, ValueError, "head dimension is 8; allowed are 16 to 256"),
    (
        {x: torch.randn(1, 1, 4, 257) for x in "qkv"},
        ValueError,
        "head dimension is 257; allowed are 16 to 256",
    ),
    ({"is_causal": 1}, TypeError, "is_causal is 1; True or False is needed"),
    ({"scale": -0.5}, ValueError, "scale is -0.5; a positive finite number, or None for 1/√d, is needed"),
    ({"scale": float("nan")}, ValueError, "scale is nan; a positive finite number"),
    ({"scale": "1"}, ValueError, "scale is '1'; a positive finite number"),
    ({"window_size": 4}, ValueError, "window_size is 4 with is_causal=False; a window needs is_causal=True"),
    (
        {"window_size": 0, "is_causal": True},
        ValueError,
        "window_size is 0; a positive integer, or None, is needed",
    ),
    ({"window_size": 2.0, "is_causal": True}, ValueError, "window_size is 2.0; a positive integer"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; a number in [0, 1) is needed"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1; a number in [0, 1) is needed"),
    (
        {"key_padding_mask": torch.ones(2, 7, dtype=torch.bool)},
        ValueError,
        "key_padding_mask is torch.bool [2, 7] on cpu;",
    ),
    (
        {"key_padding_mask": torch.ones(2, 8)},
        ValueError,
        "key_padding_mask is torch.float32 [2, 8] on cpu; torch.bool [2, 8]",
    ),
    (
        {"key_padding_mask": [True]},
        TypeError,
        "key_padding_mask is a list; a tensor [2, 8] of torch.bool is needed",
    ),
    (
        {"dropout_p": 0.1, "dropout_seed": 3},
        TypeError,
        "dropout_seed is a int; a tensor [2] of torch.int64 is needed",
    ),
    (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(2)},
        ValueError,
        "dropout_seed is torch.float32 [2] on cpu;",
    ),
]


@pytest.mark.parametrize("backend", ["tiled", "math"])
@pytest.mark.parametrize("change,error,message", WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_argument(change, error, message, backend):
    arguments = {"q": q, "k": q, "v": q} | change
    tensors = [arguments.pop(name) for name in "qkv"]
    with set_backend(backend), pytest.raises(error) as caught:
        sdpa_bob(*tensors, **arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_backend_choice():
    assert get_backend() == "auto" and resolve_backend("cpu") == "tiled"
    with set_backend("hybrid"):
        assert get_backend() == "hybrid"
        assert resolve_backend("cpu") == "hybrid (forward and first backward: tiled)"
        with set_backend("auto"):
            assert resolve_backend("cpu") == "tiled"
        assert get_backend() == "hybrid"
    set_backend("math")
    assert get_backend() == "math"
    set_backend(None)
    assert get_backend() == "auto"
    with pytest.raises(
        ValueError,
        match=r"backend is 'flash'; allowed are 'auto', 'fused', 'triton', 'tiled', 'math', 'hybrid', 'hvp_materialized', "
        "'single_pass_atomic', 'three_pass', 'paper'$",
    ):
        set_backend("flash")
    assert get_backend() == "auto"


def test_a_failing_block_restores_the_backend():
    with pytest.raises(KeyError), set_backend("math"):
        raise KeyError
    assert flashbob.get_backend() == "auto"
