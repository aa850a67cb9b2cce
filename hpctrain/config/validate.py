"""Check a config before anything is written.

The rule of a single key stands with the key in `hpctrain.config.schema`. Here are the rules between
keys, and those for free sections (`_target_`, `data.mixture`) and secrets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain import secrets
from hpctrain.config import rank_counts
from hpctrain.config.frozen import plain
from hpctrain.config.network_variables import variables
from hpctrain.config.rules import arguments, metrics, parameter_rules, starting_weights, targets
from hpctrain.config.schema import Config, DataConfig, MonitorConfig, SchedulerConfig, all_keys
from hpctrain.errors import ConfigError
from hpctrain.hardware import of_section

_IDLE_SAMPLES = 3


def validate(config: Config, world_size: int | None = None) -> None:
    """Check every value, and what must hold between several of them.

    The ConfigError has a line for each problem, with the key, its value and what is allowed.
    Without `world_size` the ranks are those that `launch` requests.
    """
    problems = [
        *(*_values(config), *_targets(config), *_mixture(config.data), *_secrets(config)),
        *_val_sets(config.data),
        *(*starting_weights.problems(config), *_hardware(config), *_tracking(config)),
    ]
    # With wrong values the rules between keys would report confusing problems.
    problems = problems or list(
        _between(config, [world_size] if world_size else config.asked_world_sizes)
    )
    if problems:
        raise ConfigError("\n".join(problems))


def validate_job(config: Config, sections: Sequence[str]) -> None:
    """Check the resources of a job that is no training, in these sections and keys."""
    problems = [
        problem
        for key in all_keys()
        if key.name.partition(".")[0] in sections
        and (problem := key.rule.problem(key.name, key.value(config)))
    ]
    if problems := problems or [*_secrets(config), *_resources(config)]:
        raise ConfigError("\n".join(problems))


def _values(config: Config) -> Iterator[str]:
    for key in all_keys():
        if problem := key.rule.problem(key.name, key.value(config)):
            yield problem


def _targets(config: Config) -> Iterator[str]:
    targets_of = {
        "model": config.model.get("_target_"),
        "task": config.task.get("_target_"),
        "optimizer": config.optimizer._target_,
    }
    for section, target in targets_of.items():
        advice = f"choose one with {section}=NAME or {section}._target_=package.module.Class"
        if wrong := list(_target(f"{section}._target_", target, advice)):
            yield from wrong
        elif section == "optimizer":
            own = config.optimizer
            given = {"lr": own.lr, **parameter_rules.weight_decay_of(own), **own.options}
            inner = {name: f"optimizer.options.{name}" for name in own.options}
            node = {"_target_": target, **given}
            yield from arguments.problems("optimizer", node, positional=1, inner=inner)
            yield from parameter_rules.problems(own)
        else:
            node = getattr(config, section)
            yield from arguments.problems(section, node)
            for where, part in _inside(section, node):
                advice = "it must be package.module.Class"
                if wrong := list(_target(f"{where}._target_", part["_target_"], advice)):
                    yield from wrong
                else:
                    yield from arguments.problems(where, part)
    yield from _schedule(config.scheduler)
    lists = {
        f"data.{key}": getattr(config.data, key) or []
        for key in ("transforms", "batch_transforms", "val_transforms", "val_batch_transforms")
    }
    for key, nodes in (
        lists | {"hooks": config.hooks, "tracking.also": config.tracking.also}
    ).items():
        for i, node in enumerate(nodes):
            advice = (
                "it must be package.module.Class, or package.module.function and _partial_: true"
            )
            where, target = f"{key}[{i}]", node.get("_target_")
            if wrong := list(_target(f"{where}._target_", target, advice)):
                yield from wrong
            else:
                yield from arguments.problems(where, node)


def _inside(key: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys and contents of the objects that are arguments of another object."""
    if not isinstance(node, dict | list):
        return
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in items:
        where = f"{key}.{name}" if isinstance(node, dict) else f"{key}[{name}]"
        if isinstance(value, dict) and "_target_" in value:
            yield where, value
        yield from _inside(where, value)


def _schedule(scheduler: SchedulerConfig) -> Iterator[str]:
    """Yield what is wrong with a schedule of the user."""
    target, options = scheduler._target_, scheduler.options
    if target is None:
        if options:
            yield f"scheduler.options={options}: they are for scheduler._target_, which is null"
        return
    if wrong := list(_target("scheduler._target_", target, "it must be package.module.function")):
        yield from wrong
        return
    known = arguments.signature(target)
    given = {"_target_": target, **options}
    if known and any(parameter.name == "max_steps" for parameter in known.parameters):
        given = {"max_steps": 1} | given
    inner = {name: f"scheduler.options.{name}" for name in options}
    yield from arguments.problems("scheduler", given, positional=1, inner=inner)


def _target(key: str, target: Any, advice: str) -> Iterator[str]:
    if not isinstance(target, str) or "." not in target:
        yield f"{key}={target}: {advice}"
    elif problem := targets.problem(target):
        yield f"{key}={target}: {problem}"


def _hardware(config: Config) -> Iterator[str]:
    try:
        of_section(config.hardware)
    except ConfigError as error:
        yield str(error)


def _mixture(data: DataConfig) -> Iterator[str]:
    for i, part in enumerate(data.mixture):
        key = f"data.mixture[{i}]"
        for needed in ("name", "path"):
            if not isinstance(part.get(needed), str):
                yield f"{key}={part}: it must be {{name: ..., path: ..., weight: ..., split: ...}}"
                return
        for unknown in part.keys() - {"name", "path", "weight", "split"}:
            yield f"{key}.{unknown} is unknown: a part has name, path, weight and split"
        weight = part.get("weight", 1)
        if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            yield f"{key}.weight={weight}: it must be a number, at least 0"
    if data.temperature != 1 and not data.mixture:
        yield f"data.temperature={data.temperature}: it weighs data.mixture, which is empty"
    names = [part["name"] for part in data.mixture]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"data.mixture: {names.count(name)} parts are named {name}"
    weights = [part.get("weight") for part in data.mixture]
    if None in weights and weights != [None] * len(weights):
        yield "data.mixture: give each part a weight, or none of them"
    elif weights and None not in weights and not any(weights):
        yield "data.mixture: the weights are all 0; one must be greater"


def _val_sets(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong with the form of data.val_sets."""
    form = "{name: ..., path: ..., split: ...}"
    names = [*data.val_splits, *(str(one.get("name")) for one in data.val_sets)]
    for i, one in enumerate(data.val_sets):
        key = f"data.val_sets[{i}]"
        texts = all(isinstance(value, str) and value for value in one.values())
        if not texts or not {"name", "path"} <= {*one} <= {"name", "path", "split"}:
            yield f"{key}={one}: it must be {form}, of which split may be left out"
        elif "/" in one["name"]:
            yield f"{key}.name={one['name']}: it is a part of the names of metrics, without a '/'"
        elif names.count(one["name"]) > 1:
            yield f"{key}.name={one['name']}: data.val_splits or another set has this name"
        elif "split" not in one and data.val_split is None:
            yield f"{key}={one}: data.val_split is null, so it needs a split"


def _secrets(config: Config) -> Iterator[str]:
    """Find secrets that would be written as they are; those of the environment are replaced."""
    variables = secrets.known()
    for key, text in _texts(plain(config)):
        section, _, name = key.rpartition(".")
        if section == "site.env":
            if secrets.is_secret(name) and secrets.is_telling(text) and text not in variables:
                yield (
                    f"{key} would be written into the job's script: export {name} in your shell "
                    "instead, jobs inherit it"
                )
        elif key.startswith("site."):
            for variable in (variables[value] for value in variables if value in text):
                yield (
                    f"{key} holds the value of {variable}, which would be written into the job's "
                    f"script: in site.setup say ${variable}, jobs inherit it"
                )
        if secrets.written_down(secrets.reference(text, values=variables)):
            yield (
                f"{key}={secrets.mask(text)} holds a password or token, which would be written to "
                "files: export it as NAME_PASSWORD and say ${oc.env:NAME_PASSWORD} in its place"
            )


def _tracking(config: Config) -> Iterator[str]:
    tracking = config.tracking
    for key, on in (("enabled", tracking.enabled), ("upload", tracking.upload)):
        if tracking.required and not on:
            yield (
                f"tracking.required=true with tracking.{key}=false: nothing would be sent to the "
                "store that it requires"
            )
    if tracking.log_model and not config.checkpoint.at_end:
        yield (
            "tracking.log_model=true with checkpoint.at_end=false: MLflow would get no model of "
            "the end of the run; give one of them"
        )
    yield from _notify(config)


def _notify(config: Config) -> Iterator[str]:
    """Check that the address of a webhook is not written anywhere, and that somebody sends."""
    notify = config.notify
    if notify.url is None:
        return
    if notify.url not in secrets.known():
        yield (
            "notify.url=*** is a secret, which would be written to files: export it in your shell "
            "as HPCTRAIN_WEBHOOK, which jobs inherit, and say "
            "notify.url='${oc.env:HPCTRAIN_WEBHOOK}'"
        )
    elif not notify.url.startswith(("https://", "http://")):
        yield "notify.url=***: it must begin with https:// or http://"
    if not config.tracking.enabled:
        yield (
            "notify.url needs tracking.enabled=true: the journal is what tells about a run "
            "(tracking.upload=false keeps it from MLflow; then `sync` sends the messages)"
        )


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a config with its dotted key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value, key)


def _between(config: Config, sizes: Sequence[int]) -> Iterator[str]:
    train, splits = config.train, config.data.val_splits
    own = config.data.evaluated
    if len({*splits, own}) <= len(splits) or any("/" in one for one in splits):
        yield (
            f"data.val_splits={splits}: it must name each split once, none with a '/', and not "
            f"data.val_split={own}"
        )
    yield from _groups(config.data)
    if train.max_epochs is None and train.max_steps is None:
        yield "train.max_epochs and train.max_steps are both null: give one of them"
    yield from _resources(config)
    yield from _learning_rate(config)
    yield from metrics.problems(config)
    yield from rank_counts.problems(config, sizes)


def _groups(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong between `data.fold`, `data.group` and the rest."""
    given = f"data.fold={data.fold}" if data.fold is not None else f"data.group={data.group}"
    if data.fold is not None and data.mixture:
        yield f"{given} with data.mixture: it divides one training split, that of data.path"
    if data.fold is not None and data.train_split in data.val_splits:
        yield (
            f"{given} with data.val_splits={data.val_splits}: the training split has the samples "
            "of both, the fold and the training"
        )
    if (data.fold is not None or data.group is not None) and data.windows.field is not None:
        yield (
            f"{given} with data.windows.field={data.windows.field}: windows of one document would "
            "be in two parts; divide the documents, with --split of data_prep"
        )
    if data.group is not None and data.fold is None:
        if data.subset is None:
            yield f"{given}: it is for data.fold or data.subset, and both are null"
        elif data.subset.endswith(".npy"):
            yield (
                f"{given} with data.subset={data.subset}: the file lists samples; it is for "
                "START:STOP:STEP, which then counts groups, or for data.fold"
            )


def _monitor(monitor: MonitorConfig) -> Iterator[str]:
    if monitor.enabled and 60.001 * monitor.idle_minutes < _IDLE_SAMPLES * monitor.every_s:
        yield (
            f"monitor.idle_minutes={monitor.idle_minutes} with monitor.every_s={monitor.every_s}: "
            f"a shorter time than {_IDLE_SAMPLES} samples says nothing; at least "
            f"{_IDLE_SAMPLES * monitor.every_s / 60:g} minutes"
        )


def _resources(config: Config) -> Iterator[str]:
    """Yield what is wrong between the keys that describe a job."""
    launch = config.launch
    yield from _monitor(config.monitor)
    if launch.gpus_per_node % launch.tasks_per_node:
        yield (
            f"launch.gpus_per_node={launch.gpus_per_node} cannot be divided evenly over "
            f"launch.tasks_per_node={launch.tasks_per_node}"
        )
    for name, (_, key) in variables(config.network, config.train).items():
        if name in config.site.env:
            yield f"{key} and site.env.{name} set the same variable: give one of them"
    container = config.site.container
    if container.runtime is not None and not container.image:
        yield f"site.container.runtime={container.runtime} needs site.container.image"
    if launch.time_min != "auto" and launch.warn_s >= 60 * launch.limit_min:
        yield (
            f"launch.warn_s={launch.warn_s} seconds is not below "
            f"launch.time_min={launch.time_min} minutes"
        )


def _learning_rate(config: Config) -> Iterator[str]:
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer.lr_scaling != "none" and optimizer.base_batch_size is None:
        yield (
            f"optimizer.lr_scaling={optimizer.lr_scaling} needs optimizer.base_batch_size: the "
            f"global batch size for which optimizer.lr={optimizer.lr} was chosen"
        )
    lengths = {
        name: length
        for name in ("warmup_steps", "warmup_samples", "warmup_epochs")
        if (length := getattr(scheduler, name))
    }
    if lengths and scheduler.kind == "one_cycle" and scheduler._target_ is None:
        yield (
            f"scheduler.{next(iter(lengths))} with scheduler.kind=one_cycle: it rises by itself, "
            "in scheduler.rise_fraction of the steps"
        )
    if len(lengths) > 1:
        given = " and ".join(f"scheduler.{name}={length}" for name, length in lengths.items())
        yield f"{given}: give one length of the warm-up and set the others to 0"
