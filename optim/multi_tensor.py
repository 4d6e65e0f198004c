"""One kernel launch over many tensors: program i works on block `blocks[i, 1]` of tensor `blocks[i, 0]`."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

# Triton's names of the dtypes that such kernels take.
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Blocks:
    """The division of a list of contiguous tensors on one device into blocks of `size` elements."""

    def __init__(self, tensors: Sequence[Tensor], size: int) -> None:
        self.device = tensors[0].device
        counts = torch.tensor([-(-x.numel() // size) for x in tensors])
        tensor = torch.repeat_interleave(torch.arange(len(tensors)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self.table = (
            torch.stack([tensor, torch.arange(len(tensor)) - first], dim=1).to(torch.int32).to(self.device)
        )
        self.numels = torch.tensor([x.numel() for x in tensors]).to(self.device)

    def __len__(self) -> int:
        return len(self.table)

    def addresses(self, *lists: Sequence[Tensor]) -> Tensor:
        """int64 [lists × tensors], where the tensors are now. Copied to the device without waiting for it."""
        addresses = torch.tensor([x.data_ptr() for xs in lists for x in xs], dtype=torch.int64)
        if self.device.type != "cuda":
            return addresses
        return addresses.pin_memory().to(self.device, non_blocking=True)
