"""The typed configuration: what every key is called, what it may hold, and which combinations make sense.

`build_config` turns plain nested dictionaries (Hydra's output, or a stored `config.yaml`) into the dataclasses below and
`validate` checks what goes beyond types. Both raise `ConfigError` with a single line that names the key, what was given
and what is allowed. Nothing here imports torch, so a wrong command line is answered at once; `validate_machine`, which
asks torch what this machine can do, imports it itself.
"""

import dataclasses
import difflib
import math
import os
import re
import shutil
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A wrong configuration. The message is one line."""


@dataclass
class RunConfig:
    name: str | None  # null: arm-model-data and the other overrides of the command line
    dir: str | None  # null: runs/<run.name>


@dataclass
class ModelConfig:
    name: str
    block_size: int  # tokens in a sequence
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float  # on embeddings, residual branches and attention probabilities
    bias: bool
    loss_chunk: int | None  # tokens whose logits exist at a time; null: those of the whole micro-batch
    recompute_blocks: bool  # activation checkpointing: less memory, more time; docs/memory.md


@dataclass
class DataConfig:
    name: Literal["shakespeare", "tokens", "fineweb"]
    path: str | None  # a text file or a folder of shards; null: the text that ships with the repository
    tokenizer: str
    tokenizer_path: str | None


@dataclass
class FineWebConfig(DataConfig):
    hub: str  # name of a dataset on the Hugging Face hub; data.path=DIR reads local Parquet files instead
    revision: str | None
    split: str
    id_column: str
    text_column: str
    validation_fraction: float  # share of the documents, by a hash of their ids
    shuffle_window: int  # documents that are shuffled at a time
    num_workers: int  # processes that read and tokenize, on each rank; 0: the trainer does it between steps
    cross_documents: bool  # blocks go on in the next document; false: a document's last block is filled up


@dataclass
class AttentionConfig:
    backend: str  # "sdpa" (PyTorch's own, differentiable once), "auto" or one of flashbob.BACKENDS


@dataclass
class OptimConfig:
    """What both optimizers have. The rate warms up linearly, then follows a cosine down to `min_lr`."""

    name: Literal["adamw", "sophia"]
    lr: float
    min_lr: float | None  # null: a tenth of lr
    warmup_steps: int  # may exceed train.max_steps, as in the published Sophia script
    decay_steps: int | None  # step at which min_lr is reached; null: train.max_steps
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float  # largest global gradient norm; 0: no clipping
    on_nonfinite: Literal["stop", "skip"]  # a loss, gradient or Hessian estimate that is inf or nan


@dataclass
class SophiaConfig(OptimConfig):
    gamma: float
    hessian_interval: int  # k: the Hessian is refreshed on optimizer steps 1, k + 1, 2k + 1, ...
    hessian_batch_size: int | None  # sequences over all ranks; null: the whole batch
    hessian_gradient: Literal[
        "shared", "separate"
    ]  # shared: H u brings the gradient along; separate: an extra pass
    hessian_method: Literal["reverse", "forward"]  # H u as a second backward pass, or along tangents
    probe: Literal["gaussian", "rademacher"]


@dataclass
class TrainConfig:
    max_steps: int
    micro_batch_size: int  # sequences in one forward pass of one rank
    global_batch_size: int  # sequences in one optimizer step, over all ranks
    precision: Literal["fp64", "fp32", "bf16"]  # bf16: autocast over fp32 weights
    compile: bool  # torch.compile: ordinary steps, and the Hessian step as one traced graph
    cuda_graph: bool  # each pass of a micro-batch replayed as one CUDA graph, which keeps the memory of the pass to itself
    shard: Literal[
        "none", "zero1", "fsdp2"
    ]  # what the ranks share out: nothing, the optimizer's states (ZeRO-1),
    # or these, gradients and parameters (PyTorch's fully_shard; AdamW alone). Changes no result; of one rank, nothing
    check_ranks_every: int  # steps between comparisons of what every rank should hold alike; 0: never
    eval_every: int  # steps; the last step is always evaluated
    eval_batches: int  # batches in the fixed validation set
    eval_batch_size: int | None  # sequences in each of them; null: train.micro_batch_size
    checkpoint_every: int  # steps; 0: only the last step
    keep_checkpoints: int
    log_every: int  # steps between progress lines; metrics.jsonl has every step in any case
    resume: str  # auto, never or a path


@dataclass
class LoggerConfig:
    name: Literal["jsonl", "wandb"]


@dataclass
class WandbConfig(LoggerConfig):
    mode: Literal["online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass
class Config:
    arm: str
    preset: str
    seed: int
    device: str
    profile: bool  # write a torch trace of three steps of rank 0, from the third step of this process on
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    attention: AttentionConfig
    optim: OptimConfig
    train: TrainConfig
    logger: LoggerConfig


# Which dataclass a section has is decided by its `name`.
VARIANTS: dict[type, dict[str, type]] = {
    DataConfig: {"shakespeare": DataConfig, "tokens": DataConfig, "fineweb": FineWebConfig},
    OptimConfig: {"adamw": OptimConfig, "sophia": SophiaConfig},
    LoggerConfig: {"jsonl": LoggerConfig, "wandb": WandbConfig},
}
GROUPS = ("model", "optim", "attention", "data", "logger", "arm", "preset")

# Keys that change nothing about what is computed: they may differ between a checkpoint and the run that resumes it,
# and they are left out of a run's default name. An entry with a final dot stands for the whole section.
MAY_CHANGE_ON_RESUME = (
    "run.",
    "logger.",
    "logger",
    "device",
    "profile",
    "arm",  # names only: what they set is compared key by key
    "preset",
    "train.resume",
    "train.shard",
    "train.check_ranks_every",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.eval_every",
)


def may_change_on_resume(key: str) -> bool:
    return any(
        key == entry or (entry.endswith(".") and key.startswith(entry)) for entry in MAY_CHANGE_ON_RESUME
    )


# --- from dictionaries to dataclasses ---------------------------------------------------------------------------------


def build_config(values: dict[str, Any]) -> Config:
    """The typed configuration; `ConfigError` for an unknown or missing key or a value of the wrong type."""
    return _build(Config, values, prefix="")


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(
            f"{prefix.rstrip('.')}={values!r}: a section is expected, with keys {_field_names(cls)}"
        )
    if cls in VARIANTS:
        cls = VARIANTS[cls].get(values.get("name"), cls)  # type: ignore[arg-type]  # a wrong name is reported below
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in hints])
    arguments = {}
    for name, hint in hints.items():
        if name not in values:
            raise ConfigError(f"{prefix}{name} is missing; expected {_describe(hint)}")
        arguments[name] = _convert(hint, values[name], f"{prefix}{name}")
    return cls(**arguments)


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, prefix=f"{key}.")  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):  # only `X | None` is used
        return None if value is None else _convert(arguments[0], value, key)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_convert(part, item, key) for part, item in zip(arguments, value))
    if origin is list and isinstance(value, (list, tuple)):
        return [_convert(arguments[0], item, key) for item in value]
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)  # `run.name=17` is a fine name
    raise ConfigError(f"{key}={_show(value)}: expected {_describe(hint)}")


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return f"a section with the keys {_field_names(hint)}"
    if origin in (Union, types.UnionType):
        return f"{_describe(arguments[0])} or null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list of {len(arguments)} numbers such as [0.9,0.95]"
    if origin is list:
        return "a list such as [a,b]"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _field_names(cls: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def all_keys() -> list[str]:
    """Every dotted key of the configuration, and the group names."""
    keys: list[str] = list(GROUPS)

    def walk(cls: Any, prefix: str) -> None:
        for variant in dict.fromkeys([cls, *VARIANTS.get(cls, {}).values()]):
            for name, hint in get_type_hints(variant).items():
                if dataclasses.is_dataclass(hint):
                    walk(hint, f"{prefix}{name}.")
                elif f"{prefix}{name}" not in keys:
                    keys.append(f"{prefix}{name}")

    walk(Config, "")
    return keys


def unknown_key(key: str, siblings: list[str] | None = None) -> ConfigError:
    """The error for a key that does not exist, with the closest one that does."""
    keys = all_keys()
    if key in keys:
        section = key.split(".")[0]
        return ConfigError(
            f"{key} does not exist with this choice of {section}; its keys are {_siblings(key, siblings)}"
        )
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "`python train.py --help` lists the keys"
    return ConfigError(f"{key} is not a key of the configuration; {hint}")


def _siblings(key: str, siblings: list[str] | None) -> str:
    if siblings is None:
        section = key.split(".")[0]
        siblings = [name for name in all_keys() if name.startswith(f"{section}.") and name != key]
    return ", ".join(siblings)


# --- what goes beyond types -------------------------------------------------------------------------------------------


def validate(config: Config, world_size: int) -> None:
    """Check values and combinations on `world_size` ranks. Raises `ConfigError`; needs neither torch nor the data."""
    model, optim, train = config.model, config.optim, config.train
    for section, names in (
        (model, ("block_size", "num_layers", "num_heads", "embed_dim", "loss_chunk")),
        (train, ("max_steps", "micro_batch_size", "global_batch_size", "eval_every", "eval_batches")),
        (train, ("eval_batch_size", "keep_checkpoints", "log_every")),
        (optim, ("decay_steps", "hessian_interval", "hessian_batch_size")),
    ):
        for name in names:
            value = getattr(section, name, None)
            _require(value is None or value >= 1, section, name, "a positive integer")
    _require(
        train.checkpoint_every >= 0, train, "checkpoint_every", "0 (the last step only) or a positive integer"
    )
    _require(train.check_ranks_every >= 0, train, "check_ranks_every", "0 (never) or a positive integer")
    _require(0 <= config.seed < 2**63, config, "seed", "an integer in [0, 2^63)")

    _require(0 <= model.dropout < 1, model, "dropout", "a number in [0, 1)")
    if model.embed_dim % model.num_heads:
        raise ConfigError(
            f"model.embed_dim={model.embed_dim} is not divisible by model.num_heads={model.num_heads}; "
            "give a width that is a multiple of the number of heads"
        )

    head_dim = model.embed_dim // model.num_heads
    if config.attention.backend != "sdpa" and not 16 <= head_dim <= 256:
        raise ConfigError(
            f"model.embed_dim={model.embed_dim} over model.num_heads={model.num_heads} is a head dimension of {head_dim}; "
            "flashbob takes 16 to 256"
        )

    for name in ("lr", "min_lr", "eps", "weight_decay", "grad_clip"):
        value = getattr(optim, name)
        _require(
            value is None or (math.isfinite(value) and value >= 0), optim, name, "a finite number, at least 0"
        )
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        raise ConfigError(
            f"optim.min_lr={optim.min_lr:g} exceeds optim.lr={optim.lr:g}; give one that is at most the peak"
        )
    _require(optim.warmup_steps >= 0, optim, "warmup_steps", "an integer, at least 0")
    _require(all(0 <= beta < 1 for beta in optim.betas), optim, "betas", "two numbers in [0, 1)")

    per_step = train.micro_batch_size * world_size
    for section, name in ((train, "global_batch_size"), (optim, "hessian_batch_size")):
        size = getattr(section, name, None)
        if size is not None and size % per_step:
            raise ConfigError(
                f"{_section(section)}.{name}={size} does not divide over {_count(world_size, 'rank')} × "
                f"train.micro_batch_size={train.micro_batch_size}; give a multiple of {per_step}"
            )

    if train.cuda_graph and not train.compile:
        raise ConfigError("train.cuda_graph=true needs train.compile=true; give both, or neither")

    if train.shard == "fsdp2" and train.check_ranks_every:
        raise ConfigError(
            f"train.check_ranks_every={train.check_ranks_every} compares what every rank holds alike, and with "
            "train.shard=fsdp2 nothing is; give 0, or train.shard=none or zero1"
        )

    if isinstance(optim, SophiaConfig):
        if train.shard == "fsdp2":
            raise ConfigError(
                "optim.name=sophia differentiates gradients, and the gradients of train.shard=fsdp2 have no graph; "
                "use train.shard=zero1, which shares out the optimizer's states"
            )
        _require(math.isfinite(optim.gamma) and optim.gamma > 0, optim, "gamma", "a positive number")
        if optim.hessian_batch_size is not None and optim.hessian_batch_size > train.global_batch_size:
            raise ConfigError(
                f"optim.hessian_batch_size={optim.hessian_batch_size} exceeds "
                f"train.global_batch_size={train.global_batch_size}; give at most the whole batch"
            )
        if optim.hessian_method == "forward" and model.recompute_blocks:
            raise ConfigError(
                "model.recompute_blocks=true has no forward mode; with optim.hessian_method=forward give "
                "model.recompute_blocks=false, or optim.hessian_method=reverse"
            )
        if config.attention.backend == "sdpa":
            raise ConfigError(
                "optim.name=sophia needs attention that is differentiable twice, and attention.backend=sdpa is not; "
                "use attention.backend=auto, math, hybrid or tiled"
            )
    if isinstance(config.logger, WandbConfig) and not config.logger.project:
        raise ConfigError("logger.project is empty; give the name of a wandb project")

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"device={config.device}: expected auto, cpu, cuda or cuda:N")
    if train.resume not in ("auto", "never") and not Path(train.resume).expanduser().exists():
        raise ConfigError(
            f"train.resume={train.resume}: no such file; expected auto, never, a checkpoint or a run directory"
        )
    if config.data.path is not None and not Path(config.data.path).expanduser().exists():
        raise ConfigError(f"data.path={config.data.path}: no such file or directory")
    if config.data.name == "tokens" and config.data.path is None:
        raise ConfigError("data=tokens needs data.path=DIR, a folder that scripts/prepare_data.py wrote")
    if isinstance(config.data, FineWebConfig):
        data = config.data
        _require(0 < data.validation_fraction < 1, data, "validation_fraction", "a number in (0, 1)")
        _require(data.shuffle_window >= 1, data, "shuffle_window", "a positive integer")
        _require(data.num_workers >= 0, data, "num_workers", "an integer, at least 0")


def validate_machine(config: Config, local_rank: int) -> None:
    """Check what depends on torch and on this machine: backend names, devices, precisions, a compiler."""
    import torch

    from flashbob import BACKENDS

    backends = ("sdpa", "auto", *BACKENDS)
    backend = config.attention.backend
    if backend not in backends:
        close = difflib.get_close_matches(backend, backends, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"attention.backend={backend}: {hint}expected one of {', '.join(backends)}")

    cuda = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    if cuda:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={config.device}: this machine has no CUDA device that torch can use; use device=cpu"
            )
        index = int(config.device.partition(":")[2] or local_rank)
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={config.device}: this process asks for GPU {index}, and the machine has "
                f"{_count(torch.cuda.device_count(), 'GPU')}; start fewer processes a node"
            )
        if config.train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"train.precision=bf16: {torch.cuda.get_device_name(index)} has no bf16; use train.precision=fp32"
            )
    elif config.train.compile and not any(
        map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))
    ):
        raise ConfigError(
            "train.compile=true: torch.compile on a CPU needs a C++ compiler, and none is installed"
        )


def _require(condition: bool, section: Any, name: str, allowed: str) -> None:
    if not condition:
        value = getattr(section, name)
        shown = (
            f"{value:g}" if isinstance(value, float) else list(value) if isinstance(value, tuple) else value
        )
        prefix = "" if isinstance(section, Config) else f"{_section(section)}."
        raise ConfigError(f"{prefix}{name}={shown}: expected {allowed}")


def _section(section: Any) -> str:
    for name, hint in get_type_hints(Config).items():
        if dataclasses.is_dataclass(hint) and isinstance(section, hint):  # type: ignore[arg-type]
            return name
    raise TypeError(f"{type(section).__name__} is not a section of the configuration")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# --- what is stored, and what is compared -----------------------------------------------------------------------------


def public_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain dictionaries that may be stored and shared.

    The home directory is written `~`, and whatever an environment variable that looks secret holds (`…TOKEN`, `…KEY`,
    `…SECRET`, `…PASSWORD`), a Hugging Face token or credentials in a URL are replaced by `***`.
    """
    return _scrub(dataclasses.asdict(config))


def _scrub(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrub(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scrub(item) for item in value]
    if not isinstance(value, str):
        return value
    secrets = [
        secret
        for name, secret in os.environ.items()
        if re.search(r"TOKEN|KEY|SECRET|PASSWORD", name, re.IGNORECASE) and len(secret) >= 8
    ]
    for secret in secrets:
        value = value.replace(secret, "***")
    value = re.sub(r"hf_[A-Za-z0-9]{20,}", "***", value)
    value = re.sub(r"(?<=://)[^/@\s]+@", "***@", value)
    home = str(Path.home())
    return re.sub(rf"(?<![^\s=:,]){re.escape(home)}(?=/|$)", "~", value) if home != "/" else value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` as `{"optim.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The keys in which two stored configurations differ, except those that may, as `key: old -> new`."""
    old, new = flatten(stored), flatten(current)
    missing = object()
    return [
        f"{key}: {_show(old.get(key, 'absent'))} -> {_show(new.get(key, 'absent'))}"
        for key in dict.fromkeys([*old, *new])
        if not may_change_on_resume(key) and old.get(key, missing) != new.get(key, missing)
    ]
