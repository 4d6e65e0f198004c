"""Without a CUDA device the kernels run in Triton's interpreter, chosen before triton is imported."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def kernels_can_run():
    pytest.importorskip("triton")
    from flashbob.kernels.common import INTERPRETED

    # Not a skip: a suite that silently runs no kernel would look healthy.
    assert INTERPRETED or torch.cuda.is_available(), (
        "triton was imported before tests/kernels/conftest.py could choose its interpreter; "
        "run with TRITON_INTERPRET=1 in the environment"
    )
