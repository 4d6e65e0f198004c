import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it once, when it is imported: kernels then run on CPU tensors, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    # A file's tests share runs, so that `make test` gives each file to one process: the longest first.
    items.sort(key=lambda item: item.path.parent.name != "train")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def backend_of_its_own():
    """A model's attention is chosen for the whole process; the next test starts with the default."""
    import flashbob  # not earlier: it imports triton, which reads the environment then

    yield
    flashbob.set_backend("auto")
