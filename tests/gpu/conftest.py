"""Fixtures for the tests on a CUDA device."""

import pytest
import torch


@pytest.fixture(autouse=True)
def give_memory_back():
    """So that several processes of pytest can share the device."""
    yield
    torch.cuda.empty_cache()
