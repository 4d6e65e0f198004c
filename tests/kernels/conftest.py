"""Without a CUDA device the kernels run in Triton's interpreter, which tests/conftest.py chooses."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def kernels_can_run():
    pytest.importorskip("triton")
    from flashbob.kernels.common import INTERPRETED

    # Not a skip: a suite that silently runs no kernel would look healthy.
    assert INTERPRETED or torch.cuda.is_available(), (
        "triton was imported before tests/conftest.py could choose its interpreter; "
        "run with TRITON_INTERPRET=1 in the environment"
    )
