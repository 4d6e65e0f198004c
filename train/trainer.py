"""The loop: batches → gradients → optimizer, with evaluation, checkpoints and metrics. Read it from `Trainer.run`.

A step t counts from 1 and trains on the sequences (t − 1)·G … t·G − 1 of the data's order, G being the global batch. They
are cut into G / M micro-batches; micro-batch m = a·W + r belongs to rank r of W, in its accumulation round a. So neither
the batches nor the Hessian's probes, which are keyed by t and m, depend on the number of ranks.
"""

import fcntl
import math
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import flashbob
from data import DataError, StreamedText, open_data
from optim import (
    HessianVectorProduct,
    HutchinsonEstimator,
    ShardedParameters,
    SophiaH,
    build_adamw,
    parameter_groups,
)
from train import checkpoint, distributed, metrics
from train.config import Config, ConfigError, SophiaConfig, flatten, may_change_on_resume, public_dict
from train.gradient_graph import GradientGraph
from train.model import GPT, GPTConfig, attention_function
from train.step_record import StepRecord, mark

MAX_SKIPPED_IN_A_ROW = 10
_STATISTICS = {  # metric: its name in SophiaH.statistics
    "hessian/clip_fraction": "clip_fraction",
    "hessian/norm": "hessian_norm",
    "hessian/negative_fraction": "negative_hessian_fraction",
    "train/momentum_norm": "momentum_norm",
}


class TrainingStopped(RuntimeError):
    """Training cannot go on. The message is one line."""


class Trainer:
    """One run of one configuration on this process's rank. `run` trains to the end, or until a signal asks to stop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.world = distributed.environment()
        self.device = distributed.choose_device(config.device, self.world)
        if config.train.cuda_graph and self.device.type != "cuda":
            raise ConfigError(f"train.cuda_graph=true needs a GPU, and device is {self.device}")
        distributed.start(self.world, self.device)
        assert config.run.dir is not None
        self.directory = Path(config.run.dir)
        self.data = open_data(
            config.data,
            config.model.block_size,
            config.seed,
            batch_size=config.train.micro_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
        )

        torch.manual_seed(config.seed)  # the same weights on every rank
        model_config = GPTConfig(
            block_size=config.model.block_size,
            vocab_size=self.data.vocab_size,
            num_layers=config.model.num_layers,
            num_heads=config.model.num_heads,
            embed_dim=config.model.embed_dim,
            dropout=config.model.dropout,
            bias=config.model.bias,
            loss_chunk=config.model.loss_chunk,
            recompute_blocks=config.model.recompute_blocks,
        )
        dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
        with self.device:
            self.model = GPT(model_config, attention_function(config.attention.backend)).to(dtype)
        torch.manual_seed(config.seed + 1 + self.world.rank)  # dropout differs between ranks

        self.fully_sharded = config.train.shard == "fsdp2" and self.world.size > 1
        if self.fully_sharded:
            distributed.fully_shard(self.world, self.device, self.model, self.model.h)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.sharded: ShardedParameters | None = None  # with train.shard=zero1
        self.optimizer = self._build_optimizer()
        # What ordinary steps run; Hessian steps run `model`: a compiled module cannot be differentiated twice.
        self.data_parallel = self._data_parallel()
        self.ordinary_model = self.data_parallel or self.model
        if config.train.compile:
            self.ordinary_model = torch.compile(self.ordinary_model)
        self.gradient_graph: GradientGraph | None = None
        if self._replays_gradients():
            self.gradient_graph = GradientGraph(self._add_gradient, self.params)
        self.estimator = self.second_order = None
        if isinstance(self.optimizer, SophiaH):
            assert isinstance(config.optim, SophiaConfig)
            params = self.sharded.params if self.sharded else self.optimizer.hessian_parameters
            self.estimator = HutchinsonEstimator(params, seed=config.seed, distribution=config.optim.probe)
            self.second_order = HessianVectorProduct(
                self.model,
                lambda model, tokens, targets: model(tokens, targets)[1],
                params=params,
                compile=config.train.compile,
                cuda_graph=config.train.cuda_graph,
                method=config.optim.hessian_method,
            )

        train = config.train
        self.rounds = train.global_batch_size // (train.micro_batch_size * self.world.size)
        self.hessian_rounds = 0
        if isinstance(config.optim, SophiaConfig):
            sequences = config.optim.hessian_batch_size or train.global_batch_size
            self.hessian_rounds = sequences // (train.micro_batch_size * self.world.size)
        self.tokens_per_step = train.global_batch_size * config.model.block_size
        self.step = 0  # steps taken
        self.skipped_in_a_row = 0
        # On the device: whether to stop, before the host knows of it.
        self._halted = torch.zeros((), dtype=torch.bool, device=self.device)
        self.elapsed_before = 0.0  # seconds of earlier processes of this run
        self._lock: IO[str] | None = None  # on rank 0

    # --- a run ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train from the checkpoint that `train.resume` means, or from the start.

        Raises ConfigError, CheckpointError or TrainingStopped, each with one line, alike on every rank.
        """
        distributed.from_main(self.world, self._prepare_directory)
        try:
            self._run()
        finally:
            if self._lock is not None:
                self._lock.close()

    def _run(self) -> None:
        self._resume()
        config, max_steps = self.config, self.config.train.max_steps
        if self.step >= max_steps:
            self._say(f"{config.run.name}: already complete, {self.step} steps; nothing to do")
            return
        self._say(self._description())
        recorder = None
        if self.world.is_main:
            OmegaConf.save(OmegaConf.create(public_dict(config)), self.directory / "config.yaml")
            recorder = metrics.Metrics(config, self.directory, first_step=self.step + 1)
        exit_code = 1
        try:
            self._train(recorder)
            exit_code = 0
        finally:
            if recorder is not None:
                recorder.close(exit_code)

    def _train(self, recorder: metrics.Metrics | None) -> None:
        train = self.config.train
        first_step, start = self.step, time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        saved_step = None
        profiler = self._profiler()

        def keep(record: StepRecord) -> dict[str, Any]:
            """Write what a step measured, once it is known."""
            row = self._finish(record)
            # Of a step that is read late without what came after it; of others with their evaluation.
            elapsed = (record.ended if record is earlier else time.perf_counter()) - start
            row["time/elapsed_s"] = self.elapsed_before + elapsed
            row["time/eta_s"] = elapsed / (record.step - first_step) * (train.max_steps - record.step)
            if recorder is not None:
                recorder.write(row)
            return row

        # The step before this one. Its numbers are read while this one runs: the device never waits for the host, except at
        # steps that are reported, evaluated or saved (with FSDP2 at every one: DTensors and found_inf do not go together).
        earlier: StepRecord | None = None
        while self.step < train.max_steps:
            self.step += 1
            is_last = self.step == train.max_steps
            try:
                record = self._take_step()
            except DataError as error:
                self.step -= 1
                if earlier is not None:
                    keep(earlier)
                if self.step > first_step and saved_step != self.step:
                    self._save(self.elapsed_before + time.perf_counter() - start)
                raise TrainingStopped(
                    f"{error}; after step {self.step}, with a checkpoint: the same command continues"
                ) from error
            if earlier is not None:
                keep(earlier)
                earlier = None
            if profiler is not None:
                profiler.step()
            if train.check_ranks_every and self.step % train.check_ranks_every == 0:
                self._check_ranks()
            signal = self._stop_signal()
            evaluates = self.step % train.eval_every == 0 or is_last
            reports = self.step % train.log_every == 0 or evaluates or self.step == first_step + 1
            saves = is_last or (train.checkpoint_every and self.step % train.checkpoint_every == 0)
            if not (reports or saves or signal):
                earlier = record
                continue
            if evaluates:
                record.row["val/loss"] = self.evaluate()
                record.row["memory/peak_gib"] = metrics.peak_memory_gib(self.device)
            row = keep(record)
            if reports:
                self._say(metrics.progress_line(row, train.max_steps))
            if saves or signal:
                self._save(row["time/elapsed_s"])
                saved_step = self.step
            if signal:
                if not is_last:
                    self._say(
                        f"{self.config.run.name}: stopped by signal {signal} after step {self.step} with a checkpoint; "
                        "the same command continues"
                    )
                return
        self._say(f"{self.config.run.name}: complete; {self.directory}")

    def _profiler(self) -> profile | None:
        """With `profile=true`, on rank 0: three steps after two, as a trace for chrome://tracing or Perfetto."""
        if not (self.config.profile and self.world.is_main):
            return None
        path = self.directory / "trace.json.gz"

        def write(p: profile) -> None:
            p.export_chrome_trace(str(path))
            self._say(f"{path}: a trace of three steps, up to step {self.step}")

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=write,
        )
        profiler.start()
        return profiler

    # --- a step --------------------------------------------------------------------------------------------------

    def _take_step(self) -> StepRecord:
        """One optimizer step. Only asks the device for it: the numbers, and whether they were finite, are read later."""
        start = mark(self.device)
        config, optimizer = self.config, self.optimizer
        lr = self.learning_rate(self.step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        row: dict[str, Any] = {"step": self.step, "tokens": self.step * self.tokens_per_step, "train/lr": lr}
        record = StepRecord(self.step, row)

        with record_function("data"):
            asked = time.perf_counter()
            batches = self._take_batches()
            row["time/data_wait_s"] = time.perf_counter() - asked
        is_hessian_step = isinstance(optimizer, SophiaH) and optimizer.hessian_due
        loss, estimate = self._accumulate(batches, record, is_hessian_step)
        distributed.sum_over_ranks(self.world, loss)
        loss /= self.rounds * self.world.size
        norm = torch.nn.utils.clip_grad_norm_(self.params, config.optim.grad_clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

        # Every rank has the same sums, so all of them come to the same decisions.
        measured = {"train/loss": loss, "train/grad_norm": norm}
        skip = ~(loss.isfinite() & norm.isfinite())
        skip_hessian = skip
        if estimate is not None:
            finite = HutchinsonEstimator.all_finite(estimate)
            measured["hessian/finite"] = finite
            skip_hessian = skip | ~finite
        if config.optim.on_nonfinite == "stop":
            skip = skip_hessian = self._halted.logical_or_(skip_hessian)
        if isinstance(optimizer, SophiaH) and estimate is not None:
            mine = self.sharded.pieces_of(estimate) if self.sharded else estimate
            optimizer.update_hessian(mine, check_finite=False, skip=skip_hessian)
        with record_function("optimizer"):
            if not self.fully_sharded:
                # Where it is 1 the optimizers leave everything as it is.
                optimizer.found_inf = skip.float()  # pyright: ignore[reportAttributeAccessIssue]
                optimizer.step()
            elif not skip:  # waits for the device
                optimizer.step()
        if isinstance(optimizer, SophiaH):
            statistics = self.sharded.statistics(optimizer) if self.sharded else optimizer.statistics()
            measured |= {name: statistics[key] for name, key in _STATISTICS.items()}
        # DDP's gradients stay views of its buckets, and a CUDA graph adds to where they are.
        self.model.zero_grad(set_to_none=self.data_parallel is None and self.gradient_graph is None)
        row["memory/peak_gib"] = metrics.peak_memory_gib(self.device)
        record.spans["time/step_s"] = start, record.send(measured, self.device)
        return record

    def _finish(self, record: StepRecord) -> dict[str, Any]:
        """The row of a step that was taken or skipped. Raises TrainingStopped if it asks for that."""
        row = record.finish()
        fault = next((key for key in ("train/loss", "train/grad_norm") if not math.isfinite(row[key])), None)
        if not row.pop("hessian/finite", True):
            self._on_nonfinite("the Hessian estimate", record.step)
            row["hessian/skipped"] = True
        if fault:
            self._on_nonfinite(fault, record.step)
            for key in ("train/loss", "train/grad_norm", *_STATISTICS):
                row.pop(key, None)
            row["train/nonfinite"] = fault
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise TrainingStopped(
                    f"step {record.step}: {fault} was not finite {MAX_SKIPPED_IN_A_ROW} times in a row"
                )
        else:
            self.skipped_in_a_row = 0
        row["time/tokens_per_s"] = self.tokens_per_step / row["time/step_s"]
        if (peak := metrics.peak_flops(self.device)) and "hessian/event_s" not in row:
            flops = self.model.flops_per_token(self.config.model.block_size) * row["time/tokens_per_s"]
            row["throughput/mfu"] = flops / (peak * self.world.size)
        return row

    def _accumulate(
        self, batches: list[tuple[Tensor, Tensor]], record: StepRecord, is_hessian_step: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Leave the global batch's mean gradient in `.grad`; returns this rank's sum of losses and, on a Hessian step,
        the estimate of the Hessian's diagonal. The first rounds give the estimate; how is `optim.hessian_gradient`.

        Between ranks the gradients travel once a step (with FSDP2 each round, so that no whole gradient stays). What `.grad`
        holds before the last backward pass, of ordinary rounds and of Hessian rounds that share their gradients, is this
        rank's own sum. In that pass DDP averages the whole of each `.grad` as soon as the pass has added its part, so the
        result is the mean over all rounds and ranks, whatever made them, up to the order of sums. A step of Hessian rounds
        alone, or of a CUDA graph's, has no such pass: it averages at its end.
        """
        optim = self.config.optim
        hessian_rounds = self.hessian_rounds if is_hessian_step else 0
        shared = isinstance(optim, SophiaConfig) and optim.hessian_gradient == "shared"
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        estimate = None
        self.model.train()

        if hessian_rounds:
            assert self.estimator is not None and self.second_order is not None
            start = mark(self.device)
            for round in range(hessian_rounds):
                micro_batch = round * self.world.size + self.world.rank
                batch = self._to_device(batches[round])
                with record_function("hessian_vector_product"), self._autocast():
                    probes = self.estimator.probes(
                        step=self.step, micro_batch=micro_batch, out=self.second_order.empty_vectors(*batch)
                    )
                    loss, gradients, products = self.second_order(probes, *batch)
                self.estimator.add(probes, products)
                if shared:
                    loss_sum += loss
                    self._add_gradients(gradients)
            estimate = self.estimator.reduce()
            record.spans["hessian/event_s"] = start, mark(self.device)

        ordinary_rounds = range(hessian_rounds if shared else 0, self.rounds)
        for round in ordinary_rounds:
            is_last = round == ordinary_rounds[-1]
            with self.data_parallel.no_sync() if self.data_parallel and not is_last else nullcontext():
                add_gradient = self.gradient_graph or self._add_gradient
                loss_sum += add_gradient(*self._to_device(batches[round]))
        if not ordinary_rounds or self.gradient_graph is not None:
            with record_function("all_reduce"):
                distributed.mean_over_ranks(self.world, [p.grad for p in self.params if p.grad is not None])
        return loss_sum, estimate

    def _add_gradient(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Add a micro-batch's share of the mean gradient to `.grad`. Returns its loss."""
        with record_function("forward"), self._autocast():
            _, loss = self.ordinary_model(tokens, targets)
        with record_function("backward"):
            (loss / self.rounds).backward()
        return loss.detach()

    def _take_batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the step: tokens and targets, on the CPU.

        All of them before anything is computed: a rank whose data end then stops every rank, and leaves none waiting.
        """
        size, batches, failure = self.config.train.micro_batch_size, [], ""
        before = self.data.state_dict() if isinstance(self.data, StreamedText) else None
        try:
            for round in range(self.rounds):
                micro_batch = ((self.step - 1) * self.rounds + round) * self.world.size + self.world.rank
                batches.append(self._pinned(self.data.train_batch(micro_batch * size, size)))
        except DataError as error:
            failure = str(error)
        if isinstance(self.data, StreamedText):  # the others have nothing that can fail here
            failure = next(filter(None, distributed.gather(self.world, failure)), "")
        if failure:
            if isinstance(self.data, StreamedText) and before is not None:
                self.data.load_state_dict(before)  # the step takes the same batches when it is tried again
            raise DataError(failure)
        return batches

    def _pinned(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """In memory that a GPU copies from while the host goes on."""
        if self.device.type != "cuda":
            return batch
        tokens, targets = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x) for x in batch)
        return tokens, targets

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _add_gradients(self, gradients: list[Tensor]) -> None:
        """Add these of a Hessian round, which the next one may overwrite, to `.grad`."""
        assert self.second_order is not None
        share, held, added = 1.0 / self.rounds, [], []
        for p, gradient in zip(self.second_order.params, gradients):
            if p.grad is None:
                p.grad = gradient * share
            else:
                held.append(p.grad)
                added.append(gradient)
        if held:
            torch._foreach_add_(held, added, alpha=share)  # pyright: ignore[reportPrivateImportUsage]

    def _on_nonfinite(self, what: str, step: int) -> None:
        if self.config.optim.on_nonfinite == "stop":
            raise TrainingStopped(
                f"step {step}: {what} is not finite; the weights are those of step {step - 1}. Lower optim.lr, or "
                "go on past such steps with optim.on_nonfinite=skip"
            )
        self._say(f"step {step}: {what} is not finite; skipped")

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1: linear over warmup_steps, then a cosine that ends in min_lr at decay_steps."""
        optim = self.config.optim
        min_lr = 0.1 * optim.lr if optim.min_lr is None else optim.min_lr
        if step <= optim.warmup_steps:
            return optim.lr * step / optim.warmup_steps
        decay_steps = optim.decay_steps or self.config.train.max_steps
        if step >= decay_steps:
            return min_lr
        progress = (step - optim.warmup_steps) / (decay_steps - optim.warmup_steps)
        return min_lr + 0.5 * (optim.lr - min_lr) * (1.0 + math.cos(math.pi * progress))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the fixed validation batches, which the ranks share out. The same on every rank."""
        train = self.config.train
        batch_size = train.eval_batch_size or train.micro_batch_size
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, number of sequences
        self.model.eval()
        for index, (tokens, targets) in enumerate(
            self.data.validation_batches(batch_size, train.eval_batches)
        ):
            if index % self.world.size == self.world.rank:
                with self._autocast():
                    _, loss = self.model(tokens.to(self.device), targets.to(self.device))
                total += torch.stack([loss.double() * len(tokens), total.new_tensor(len(tokens))])
        if self.fully_sharded and 0 < (index + 1) % self.world.size <= self.world.rank:
            # A rank that has no batch in the last round: its share of the parameters is needed all the same.
            with self._autocast():
                self.model(tokens.to(self.device), targets.to(self.device))
        distributed.sum_over_ranks(self.world, total)
        return (total[0] / total[1]).item()

    # --- what a run consists of ----------------------------------------------------------------------------------

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optim = self.config.optim
        groups = parameter_groups(self.model.named_parameters(), optim.weight_decay)
        if self.config.train.shard == "zero1" and self.world.size > 1:
            self.sharded = ShardedParameters(groups)
            groups = self.sharded.groups
        if isinstance(optim, SophiaConfig):
            optimizer = SophiaH(
                groups,
                lr=optim.lr,
                betas=optim.betas,
                eps=optim.eps,
                gamma=optim.gamma,
                weight_decay=optim.weight_decay,
                hessian_interval=optim.hessian_interval,
            )
        else:
            optimizer = build_adamw(groups, optim.lr, optim.betas, optim.eps)
        if self.sharded:
            self.sharded.attach(optimizer)
        return optimizer

    def _replays_gradients(self) -> bool:
        """Whether ordinary rounds are CUDA graphs. Dropout's masks, and FSDP2's collectives, are not for a graph."""
        train = self.config.train
        return train.cuda_graph and not self.fully_sharded and self.config.model.dropout == 0

    def _data_parallel(self) -> DistributedDataParallel | None:
        """The model as ordinary steps of several ranks run it; None for one rank, and where FSDP2 or the end of the step do
        this instead."""
        if self.world.size == 1 or self.fully_sharded or self._replays_gradients():
            return None
        return distributed.data_parallel(self.model)

    def _check_ranks(self) -> None:
        """Raise TrainingStopped unless parameters and optimizer states are the same bits on every rank.

        With train.shard=zero1 the states are each rank's own, and parameters alone are compared.
        """
        tensors = list(self.model.named_parameters())
        if self.sharded is None:
            name_of = {p: name for name, p in tensors}
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    state = self.optimizer.state[p]
                    tensors += [
                        (f"the optimizer's {key} of {name_of[p]}", state[key]) for key in sorted(state)
                    ]
        if difference := distributed.first_difference(self.world, tensors):
            raise TrainingStopped(
                f"step {self.step}: the ranks have come apart: {difference}. No checkpoint of this step was written; the "
                "same command continues from the last one"
            )

    def _autocast(self) -> AbstractContextManager:
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _stop_signal(self) -> int:
        """A signal that reached any rank since the start, on every rank; 0 for none."""
        return distributed.max_over_ranks(self.world, distributed.stop_signal())

    def _say(self, line: str) -> None:
        if self.world.is_main:
            print(line, flush=True)

    def _description(self) -> str:
        config = self.config
        attention = "PyTorch's fused attention"
        if config.attention.backend != "sdpa":
            attention = f"flashbob {flashbob.resolve_backend(self.device)}"
        return (
            f"{config.run.name}: {config.optim.name}, {config.model.name} with {self.model.num_parameters() / 1e6:.1f} M "
            f"parameters, attention: {attention}, {config.train.precision} on {self.world.size} × {self.device.type}, "
            f"{self.tokens_per_step:,} tokens a step; "
            + (f"continues after step {self.step}" if self.step else f"{config.train.max_steps} steps")
        )

    # --- the run directory and checkpoints -----------------------------------------------------------------------

    def _prepare_directory(self) -> None:
        """Make the run directory, and make sure that this process is alone in it and that a checkpoint fits."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"run.dir={self.directory}: cannot be written to ({error.strerror})") from None
        try:
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # freed by the system when the process ends, however
        except OSError:
            raise ConfigError(f"run.dir={self.directory}: another process is training in it") from None
        self._lock = lock
        if self.config.train.resume == "never" and checkpoint.list_checkpoints(
            self.directory / "checkpoints"
        ):
            raise ConfigError(
                f"train.resume=never, and {self.directory} has checkpoints that would be lost; choose another run.name, "
                "delete the folder, or continue with train.resume=auto"
            )
        states = 3  # weights, and the optimizer's two
        needed = states * sum(p.numel() * p.element_size() for p in self.params)
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise ConfigError(
                f"run.dir={self.directory}: {free / 2**30:.1f} GiB are free there, and a checkpoint takes "
                f"{needed / 2**30:.1f} GiB"
            )

    def _save(self, elapsed: float) -> None:
        random_states = distributed.gather(self.world, _random_states(self.device))
        stream = self.data.state_dict() if isinstance(self.data, StreamedText) else None
        streams = distributed.gather(self.world, stream)
        # Whole tensors, as one process has them: any number of ranks, sharded or not, can go on from them.
        if self.fully_sharded:
            model_state, optimizer_state = checkpoint.gather_fully_sharded(self.model, self.optimizer)
        else:
            model_state = self.model.state_dict()
            sharded, optimizer = self.sharded, self.optimizer
            optimizer_state = sharded.state_dict(optimizer) if sharded else optimizer.state_dict()

        def write() -> None:
            checkpoint.save(
                self.directory / "checkpoints",
                self.step,
                {
                    "config": public_dict(self.config),
                    "vocab_size": self.data.vocab_size,
                    "model": model_state,
                    "optimizer": optimizer_state,
                    "next_sequence": self.step * self.config.train.global_batch_size,
                    "elapsed_s": elapsed,
                    "skipped_in_a_row": self.skipped_in_a_row,
                    "random_states": random_states,
                    "streams": streams,
                },
                keep=self.config.train.keep_checkpoints,
            )

        distributed.from_main(self.world, write)

    def _resume(self) -> None:
        resume = self.config.train.resume
        if resume == "never":
            return
        if resume == "auto":
            contents, warnings = checkpoint.load_latest(self.directory / "checkpoints")
            for line in warnings:
                self._say(f"warning: {line}; going back to an earlier one")
            if contents is None:
                return
        else:
            contents = checkpoint.load(checkpoint.locate(resume))
        self._restore(contents)

    def _restore(self, contents: dict[str, Any]) -> None:
        stored, current = (flatten(x) for x in (contents["config"], public_dict(self.config)))
        differing = [
            line
            for line in checkpoint.differing_keys(stored, current)
            if not may_change_on_resume(line.partition(":")[0])
        ]
        if differing:
            raise ConfigError(
                f"the checkpoint after step {contents['step']} has another configuration: {'; '.join(differing)}. "
                "Change it back, or choose another run.name"
            )
        if self.fully_sharded:
            checkpoint.restore_fully_sharded(
                self.model, self.optimizer, contents["model"], contents["optimizer"]
            )
        else:
            self.model.load_state_dict(contents["model"])
            if self.sharded:
                self.sharded.load_state_dict(self.optimizer, contents["optimizer"])
            else:
                self.optimizer.load_state_dict(contents["optimizer"])
        self.step = contents["step"]
        self.elapsed_before = contents["elapsed_s"]
        self.skipped_in_a_row = contents["skipped_in_a_row"]
        if isinstance(self.data, StreamedText):
            streams = contents["streams"]
            if len(streams) != self.world.size:
                raise ConfigError(
                    f"the checkpoint after step {self.step} is of {len(streams)} ranks, each with documents of its own, and this "
                    f"run has {self.world.size}; start {len(streams)} ranks"
                )
            self.data.load_state_dict(streams[self.world.rank])
        states = contents["random_states"]
        if len(states) == self.world.size:
            _set_random_states(states[self.world.rank], self.device)
        elif self.config.model.dropout:
            raise ConfigError(
                f"the checkpoint after step {self.step} is of {len(states)} ranks and this run has {self.world.size}: with "
                f"model.dropout={self.config.model.dropout:g} it would not go on as it would have; start {len(states)} ranks"
            )


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
