"""`python -m hpctrain plan OVERRIDES`: does it fit, in which layout, how long, at what cost.

It starts no job, and needs neither a GPU nor a process group.
"""

import argparse
import gc
import json
import logging
from dataclasses import replace

from hpctrain.base.errors import ConfigError
from hpctrain.base.secrets import referenced
from hpctrain.base.terminal.console import Console
from hpctrain.config.composing.compose import compose
from hpctrain.config.rules.combinations import refused
from hpctrain.config.rules.own_loop import check_ours
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.insight.estimates.hardware import known, load, of_section

# What decides a plan.
_SECTIONS = ("launch", "train", "parallel", "precision", "optimizer", "checkpoint")
_DOES_NOT_FIT, _UNKNOWN = 8, 10


def main(argv: list[str]) -> int:
    """Print the plan of a run.

    Returns:
        The exit code: 0 if it fits, 8 if it does not, 10 if that is unknown.
    """
    given = _parser().parse_intermixed_args(argv)
    nodes = None if given.nodes is None else _numbers(given.nodes)
    folders = [given.config_dir] if given.config_dir else []
    for text in given.overrides:
        if text.startswith("hardware=") and text != "hardware=null":
            load(text.partition("=")[2], folders)  # its error says how to add a machine
    config = _composed_for(given.overrides, given.config_dir, given.sample_shape)
    hardware = of_section(config.hardware) if config.hardware else None
    if hardware and hardware.memory_bytes and config.launch.gpus_per_run is not None:
        share = int(config.launch.gpus_per_run * hardware.memory_bytes)
        hardware = replace(hardware, memory_bytes=share)

    validate_job(config, _SECTIONS)
    gc.disable()  # importing torch makes many objects and drops few
    from hpctrain.engine.parallel.precision import default_dtype
    from hpctrain.insight.plan import printing
    from hpctrain.insight.plan.answer import Query, answer

    # What was imported stays, so no collection needs to look at it, which would take seconds.
    gc.freeze()
    gc.enable()
    # torch writes an operation that does not fit to stderr, too; the ConfigError tells it well.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)

    names = {text.partition("=")[0].lstrip("+") for text in given.overrides}
    tasks, per_node = config.launch.tasks_per_node, config.launch.gpus_per_node
    if tasks > 1 or names & {"launch", "launch.tasks_per_node"}:
        per_node = tasks  # the command line or the config asks for it
    layout = any(name in _LAYOUT or name.startswith("parallel") for name in names)
    asked = Query(
        *(config, hardware, nodes, given.sample_shape, given.budget, layout), per_node or 0
    )
    others = () if nodes is not None else (load(name, folders) for name in known(folders))
    with default_dtype(config.precision):
        found = answer(asked, [other for other in others if other.memory_bytes is not None])
    lacking = () if hardware is None else hardware.lacks(config.precision.compute)
    told = refused(config, "idle_keys") if asked.named or hardware is None else ()
    warnings = [*told, *lacking]
    trained = referenced([text for text in given.overrides if text not in _NO_DATA])
    trained = [*(["--config-dir", given.config_dir] if given.config_dir else []), *trained]
    console, facts = Console(), found.as_json() | {"warnings": warnings}
    if given.json:
        print(json.dumps(referenced(facts), indent=1))
    else:
        printing.show(console, found, facts, trained)
    return {True: 0, False: _DOES_NOT_FIT, None: _UNKNOWN}[found.fits] if hardware else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hpctrain plan", description="Memory, time and cost of a run, before it is queued."
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as for a training")
    add("--config-dir", help="a folder with more configs, and hardware/*.yaml")
    add("--nodes", help="numbers of nodes to look at: 1,2,4")
    add("--sample-shape", help="8193 (tokens of a window) or 3x224x224")
    add("--budget", help="300e9tokens, 20epochs, 1e6samples or 5000steps")
    add("--json", action="store_true", help="print one object")
    return parser


def _composed_for(overrides: list[str], config_dir: str | None, shape: str | None) -> Config:
    """Return the config; what a plan does not need has a value that stands for it."""
    names = {text.partition("=")[0].lstrip("+") for text in overrides}
    without = [text for text in overrides if text not in _NO_DATA]
    no_data = shape is None and (len(without) < len(overrides) or not names & _DATA)
    added = []
    if (no_data or shape is not None) and not any(name.startswith("data.path") for name in names):
        added.append("data.path=none")
    if "experiment" not in names:
        windows = shape is not None and "x" not in shape
        if not any(name == "task" or name.startswith("task.") for name in names):
            added.append(f"task={'language_model' if windows else 'classification'}")
        added += [] if "metric" in names else ["metric=val/loss"]
    config = compose([*(["--config-dir", config_dir] if config_dir else []), *without, *added])
    if config is None:
        raise ConfigError("plan takes KEY=VALUE arguments of one run, without -m and --cfg")
    check_ours(config, "plan")
    if not config.model:
        raise ConfigError(
            "model is missing: give model=NAME, or choose an experiment=NAME that has one (python "
            "-m hpctrain --help all lists them)"
        )
    if no_data:
        raise ConfigError(
            "data: without a data set --sample-shape stands for it: 8193 (tokens of a window) or "
            "3x224x224"
        )
    if config.train.max_steps is None and config.train.max_epochs is None:
        config.train.max_epochs = 1
    if config.train.lora.patterns and config.checkpoint.init_from is None:
        config.checkpoint.init_from = "none"  # adapters need a base, but a plan not its weights
    return config


_DATA = {"experiment", "data", "data.path", "data.mixture"}
_NO_DATA = ("data=null", "data.path=null")
_LAYOUT = {"launch", "launch.nodes", "launch.tasks_per_node"}
_LAYOUT |= {f"train.{n}" for n in ("accumulate", "micro_batch_size", "activation_checkpointing")}


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 100_000 for part in parts):
        raise ConfigError(f"--nodes={text}: it must be numbers of nodes, such as 4 or 1,2,4")
    return sorted({int(part) for part in parts})
