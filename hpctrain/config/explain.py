"""Turn the long errors of Hydra and OmegaConf into one short paragraph."""

import difflib
import glob
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from hpctrain.base import gone
from hpctrain.config.launcher_keys import unknown as unknown_launcher_key
from hpctrain.config.rules.targets import named, signature, takes_any

# The names that other tools have for our keys; docs/migrate.md has whole tables.
# Of Lightning, Hugging Face, DeepSpeed, Accelerate and torch.
_OTHERS = {
    "checkpoint.best": "save_top_k load_best_model_at_end metric_for_best_model",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.init_from": "pretrained",
    "checkpoint.keep": "save_total_limit",
    "data.buckets.field": "group_by_length",
    "data.shuffle": "shuffle DistributedSampler set_epoch",
    "data.subset": "limit_train_batches overfit_batches",
    "data.tail": "dataloader_drop_last",
    "data.threads": "dataloader_num_workers num_workers pin_memory",
    "data.val_split": "limit_val_batches",
    "debug=fast": "fast_dev_run num_sanity_val_steps",
    "hooks": "callbacks",
    "launch.nodes": "num_nodes num_machines nnodes",
    "launch.tasks_per_node": "devices nproc_per_node num_processes",
    "launch.time_min": "max_time",
    "name": "run_name",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate",
    "optimizer.options": "adam_beta1 adam_beta2 adam_epsilon",
    "output_dir": "default_root_dir",
    "parallel": "strategy zero_optimization",
    "parallel.blocks": "auto_wrap_policy fsdp_transformer_layer_cls_to_wrap",
    "parallel.ddp.bucket_mb": "bucket_cap_mb",
    "parallel.ddp.find_unused_parameters": "ddp_find_unused_parameters",
    "parallel.fsdp.offload": "offload_optimizer offload_param cpu_offload",
    "parallel.device": "accelerator CUDA_VISIBLE_DEVICES",
    "precision.compute": "bf16 fp16 amp mixed_precision autocast",
    "scheduler.kind": "lr_scheduler_type",
    "scheduler.warmup_epochs": "warmup_ratio",
    "seed": "seed_everything",
    "task.label_smoothing": "label_smoothing_factor",
    "tracking.also": "report_to",
    "train.accumulate": "accumulate_grad_batches gradient_accumulation_steps",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.clip_norm": "gradient_clip_val max_grad_norm",
    "train.compile": "torch_compile",
    "train.deterministic": "full_determinism",
    "train.eval_every": "check_val_every_n_epoch val_check_interval eval_steps",
    "train.global_batch_size": "batch_size",
    "train.log_every": "log_every_n_steps logging_steps",
    "train.max_epochs": "num_train_epochs epochs",
    "train.micro_batch_size": "auto_find_batch_size per_device_train_batch_size",
    "train.profile": "profiler",
}
OTHER_NAMES = {name: ours for ours, names in _OTHERS.items() for name in names.split()}


def explain(error: BaseException, known_keys: Iterable[str]) -> str:
    """Return a text with the key, the value, what is allowed, and a "did you mean" of the keys."""
    text = str(error)
    if override := getattr(error, "override", None):
        return (
            f"{override}: not of the form KEY=VALUE ({text.splitlines()[0]}); quote what is no "
            "plain word for the shell and for Hydra: 'KEY=\"VALUE\"'"
        )
    while (cause := error.__cause__) is not None:
        error = cause
        text += "\n" + str(error)
    keys = list(known_keys)
    if several := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, values = several.groups()
        return (
            f"{key}={values}: these are several values; add -m for one run with each of them, or "
            f"write '{key}=[{values}]' for a list"
        )
    inside = re.search(r"In '((\w+)/.*)': Could not (?:override|find) '\2/(\w+)(?:@|/(\S+)')", text)
    twice = re.search(r"()()Multiple values for (\w+)\. To override .*: (.*)'", text)
    if wrong := inside or twice:
        where = f"{wrong[1]}.yaml: " if wrong[1] else ""
        return f"{where}its choice of {wrong[3]} is written {as_default(wrong[3], wrong[4])}"
    if file := re.search(r"In '((?:experiment|debug)/.*)': Could not override '\S+@", text):
        return f"{file[1]}.yaml: {_GLOBAL}"
    key = (re.search(r"full_key: (\S+)", text) or ["", ""])[1]
    if key and re.search(r"Key '.*' (is )?not in ", text):
        section, parent = key.rpartition(".")[0], getattr(error, "parent_node", None)
        if section in ("model", "task") and isinstance(parent, Mapping):
            return _unknown_argument(key, parent)
        return unknown_key(key, keys)
    if missing := re.search(r"Interpolation key '(.*)' not found", text):
        return f"{key}: it refers to ${{{missing[1]}}}, and there is no such key"
    if unset := re.search(r"Environment variable '(.*)' not found", text):
        return f"{key}: the environment variable {unset[1]} is not set here"
    if wrong := re.search(r"Value '(.*)' of type '\S+' could not be converted to (\w+)", text):
        left = gone.sentence(f"{key}={wrong[1]}")
        return left or f"{key}={wrong[1]}: it must be of type {wrong[2].lower()}"
    if wrong := re.search(r"Value '(.*)' of type .* with type hint 'Union\[int, str\]'", text):
        return f"{key}={wrong[1]}: it must be of type integer or text"
    if wrong := re.search(r"Could not find '([^/']+)/(.+)'", text):
        options = re.search(r"Available options in '(.*)':\n((?:\t.*\n?)+)", text)
        group = options[1] if options else wrong[1]  # a group such as `hydra/sweeper` has a slash
        choice = f"{wrong[1]}/{wrong[2]}".removeprefix(f"{group}/")
        if left := gone.sentence(f"{group}={choice}"):
            return left
        listed = ", ".join(options[2].split()) if options else "none"
        own = f"{group}/{choice}.yaml"
        for found in (*glob.glob(glob.escape(own)), *sorted(glob.glob(f"*/{glob.escape(own)}"))):
            listed += f"; --config-dir {found.removesuffix(own)[:-1] or '.'} adds {found}"
        return f"{group}={choice}: no such choice; there are: {listed}"
    if "is not a ListConfig, list or tuple" in text:
        asked = re.search(r"Error merging override ([^\n]+)", text)
        return f'{asked[1] if asked else key}: it must be a list, such as \'["first","second"]\''
    if asked := re.search(r"Error merging override ([^\n]+)", text):
        rest = text.partition(asked[0])[2].strip().splitlines()
        if rest and re.search("is not a subclass of|^Cannot assign .* to Dict", rest[0]):
            return f"{asked[1]}: {of_section(asked[1].partition('=')[0], keys)}"
        if rest and rest[0].endswith("is not Optional"):
            return f"{asked[1]}: it must have a value"
        return f"{asked[1]}: {rest[0] if rest else 'it does not fit the schema'}"
    noise = ("full_key", "object_type", "reference_type", "See https://hydra.cc")
    lines = [line.strip() for line in str(text).splitlines()]
    return " ".join(dict.fromkeys(ln for ln in lines if ln and not ln.startswith(noise)))


_GLOBAL = "its first line must be `# @package _global_`"


def as_default(group: str, choice: str | None) -> str:
    """Return how the defaults list of a file chooses a file of another group."""
    return f"`- override /{group}: {choice or 'NAME'}` below `defaults`"


def of_section(name: str, keys: Iterable[str]) -> str:
    """Return the text for a section that was given a plain value."""
    inner = next((key for key in keys if key.startswith(f"{name}.")), f"{name}.KEY")
    return f"{name} has keys of its own; the value belongs to one of them, such as {inner}"


def unknown_key(key: str, keys: list[str]) -> str:
    """Return a text with the most similar key and with the keys of the section.

    For a key that has left it is what takes its place.
    """
    if left := gone.sentence(key):
        return left
    section, _, name = key.rpartition(".")
    others = [known for known in keys if not key.startswith(f"{known}.")]
    near = same_name(name, others) or [*filter(None, [OTHER_NAMES.get(name)])]
    near = near or difflib.get_close_matches(key, others, n=1, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if key in ("experiment", "debug"):
        return f"unknown key {key}: if it comes from a file in {key}/, {_GLOBAL}"
    siblings = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section]
    if section == "hydra.launcher":
        return unknown_launcher_key(key.rpartition(".")[2])
    if section.startswith("hydra.launcher."):
        return f"unknown key {key}: +{key}=VALUE adds it"
    if section.startswith("hydra"):
        return f"unknown key {key}: `--cfg hydra` shows those of Hydra"
    if siblings:
        return f"unknown key {key}: {hint}{section or 'the top level'} has {', '.join(siblings)}"
    return f"unknown key {key}: {hint}+{key}=VALUE adds it"


def same_name(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys of other sections with this name, such as `optimizer.lr` for `lr`."""
    return [key for key in keys if key.endswith(f".{name}")]


def _unknown_argument(key: str, section: Mapping[Any, Any]) -> str:
    """Return the error for a key that a section with a `_target_` does not have yet."""
    place, _, name = key.rpartition(".")
    adds, target = f"+{key}=VALUE adds it", None
    with suppress(OmegaConfBaseException):  # `???`, or it refers to what is not there
        target = section.get("_target_")
    if target is None:
        return f"unknown key {key}: {place} has no _target_ yet; choose one with {place}=NAME"
    known = signature(str(target))
    names = named(known) if known else [str(each) for each in section]
    if name in names:
        return f"unknown key {key}: {target} has this argument, and the config has not; {adds}"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {place}.{near[0]}? " if near else ""
    more = f"; {adds}" if known is None or takes_any(known) else ""
    return f"unknown key {key}: {hint}{target} has {', '.join(names)}{more}"
