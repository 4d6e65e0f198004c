"""What a step measured, while its numbers are still on their way from the device."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """This point of the device's work. On a GPU it is passed when everything asked for before is done; nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class StepRecord:
    """Of step `step`: `row`, what the host knows, and what the device will know. `finish` puts all into `row`."""

    step: int
    row: dict[str, Any]
    spans: dict[str, tuple[Mark, Mark]] = field(default_factory=dict)  # row's name: from, to
    ended: float = math.nan  # `perf_counter` when the step was done, or when `finish` saw that it was
    _names: list[str] = field(default_factory=list)
    _values: Tensor | None = None
    _sent: Mark = 0.0

    def send(self, values: dict[str, Tensor], device: torch.device) -> Mark:
        """Have `values`, 0-dim tensors, copied to the host as soon as the device has them. Returns the mark after that."""
        self._names = list(values)
        stacked = torch.stack([x.detach().to(torch.float64) for x in values.values()])
        self._values = stacked.to("cpu", non_blocking=True)
        self._sent = mark(device)
        return self._sent

    def finish(self) -> dict[str, Any]:
        """`row`, complete, with spans in seconds. Waits for what `send` asked for; spans must have ended by then."""
        assert self._values is not None
        self.ended = _reached(self._sent)
        self.row |= dict(zip(self._names, self._values.tolist()))
        self.row |= {name: _seconds(*span) for name, span in self.spans.items()}
        return self.row


def _reached(mark: Mark) -> float:
    if not isinstance(mark, torch.cuda.Event):
        return mark
    mark.synchronize()
    return time.perf_counter()


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start
