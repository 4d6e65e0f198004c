"""Ranks: who this process is, how ranks agree, and what asks a run to stop."""

import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

# torch is imported where it is used: `environment` and the signals are needed before the configuration is known to be
# good, and importing torch takes seconds.

T = TypeVar("T")

# SIGUSR1 is what batch systems send before the time limit; STOP_SIGNAL=USR2 takes another where it has another use.
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.Signals[f"SIG{os.environ.get('STOP_SIGNAL', 'USR1').removeprefix('SIG')}"],
)
_received: list[int] = []  # signals that asked to stop, in order


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def environment() -> World:
    """This process's place, from the variables that torchrun sets; a single process without them."""
    return World(
        rank=int(os.environ.get("RANK", 0)),
        size=int(os.environ.get("WORLD_SIZE", 1)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
    )


# --- signals ----------------------------------------------------------------------------------------------------------


def catch_stop_signals(starting: bool = False) -> None:
    """From now on SIGTERM, SIGUSR1 (or $STOP_SIGNAL) and a first Ctrl-C are only noted; a second Ctrl-C ends the process at once.

    While the run is `starting` SIGTERM keeps its effect: nothing can be lost yet, and it is how torchrun ends a rank that
    waits for a dead one to join, which could not act on a note for half an hour.
    """
    for number in STOP_SIGNALS:
        if not (starting and number == signal.SIGTERM):
            signal.signal(number, _note)


def ignore_stop_signals() -> None:
    """For the end of the process: the interpreter gives handlers back first, and a late signal would end it as killed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_signal() -> int:
    """The first stop signal that this process received, 0 for none. Ranks agree on it in the trainer."""
    return _received[0] if _received else 0


# --- processes --------------------------------------------------------------------------------------------------------


def choose_device(name: str, world: World) -> "torch.device":
    """`auto` is the GPU if there is one; `cuda` is the GPU of the local rank."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{world.local_rank}"
    return torch.device(name)


def start(world: World, device: "torch.device") -> None:
    """Join the process group when there is more than one rank: NCCL on GPUs, gloo on CPUs and for Python objects."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shared and attempt != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun's store outlives the ranks: without names of their own, restarted ranks find the addresses of dead ones
            # (pytorch issue 135712). On several nodes the count is each node's own: slurm/node.sh has torchrun share no store.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = PrefixStore(f"attempt-{attempt}", TCPStore(address, port, world.size, is_master=False))
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
        else:
            dist.init_process_group(backend)


def shutdown() -> None:
    """Leave the process group."""
    if "torch.distributed" not in sys.modules:
        return  # none was joined: a wrong command line ends without waiting for torch to be imported
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's thread frees the tensors of the last operation on its own time and needs the interpreter's lock for it;
        # if the interpreter is ending by then the process aborts ("terminate called without an active exception").
        time.sleep(0.2)


def from_main(world: World, function: Callable[[], T]) -> T:
    """`function()` as rank 0 computes it, on every rank; an exception that it raises is raised on every rank."""
    outcome: list[Any] = [None, None]
    if world.is_main:
        try:
            outcome[0] = function()
        except Exception as error:
            if world.size == 1:
                raise
            outcome[1] = error
    if world.size > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather(world: World, value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks, on every rank."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(world: World, tensor: "Tensor") -> "Tensor":
    """`tensor` summed over ranks, in place."""
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def max_over_ranks(world: World, value: int) -> int:
    """The largest `value` of any rank. Travels between CPUs: no GPU is waited for."""
    if world.size == 1:
        return value
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def mean_over_ranks(world: World, tensors: "Sequence[Tensor]") -> None:
    """Average each of `tensors` over ranks, in place, without a copy: all reductions are in flight together."""
    if world.size == 1:
        return
    import torch
    import torch.distributed as dist

    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()
    torch._foreach_div_(list(tensors), world.size)  # pyright: ignore[reportPrivateImportUsage]


# --- models over ranks ------------------------------------------------------------------------------------------------


def data_parallel(model: "nn.Module") -> "DistributedDataParallel":
    """`model`, which now averages gradients over ranks while a backward pass is still running.

    `.grad` are views of the buckets that travel: there is no second copy of the gradients as long as they are zeroed, not
    set to None.
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fully_shard(
    world: World, device: "torch.device", model: "nn.Module", blocks: "Iterable[nn.Module]"
) -> None:
    """FSDP2: each rank holds its share of parameters, gradients and optimizer states; `blocks` are gathered one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The logits are a view, and nothing here writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (world.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


# --- the same state on every rank -------------------------------------------------------------------------------------


def first_difference(world: World, named_tensors: "Iterable[tuple[str, Tensor]]") -> str:
    """Which rank holds other bits than the others, and in which tensor first; "" if all agree. The same on every rank.

    A tensor that most ranks agree on is taken to be right there; between two ranks, rank 0's. Only a checksum of each
    tensor travels. Ranks must give tensors of the same names in the same order.
    """
    import torch

    names, sums = [], []
    for name, tensor in named_tensors:
        names.append(name)
        sums.append(_checksum(tensor))
    of_rank = gather(world, torch.stack([x.to(sums[0].device) for x in sums]).tolist())
    for index, name in enumerate(names):
        values = [checksums[index] for checksums in of_rank]
        usual, _ = Counter(values).most_common(1)[0]  # the first of equals: rank 0's
        if odd := [rank for rank, value in enumerate(values) if value != usual]:
            ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
            return f"{name} of {ranks} is not that of rank {values.index(usual)}"
    return ""


def _checksum(tensor: "Tensor") -> "Tensor":
    """Σ wᵢ · wordᵢ mod 2⁶⁴ of the tensor's bits, on its device: int64, 0-dim. The wᵢ are odd: no word changes unseen."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    chunk = 1 << 22  # words whose 64-bit copies exist at a time
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk].long()
        index = torch.arange(start, start + len(part), device=tensor.device)
        total += (part * ((index * 0x1E3779B97F4A7C15) | 1)).sum()  # wraps around, like all integers here
    return total
