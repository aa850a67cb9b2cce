"""What to think about before a run is queued: warnings from cheap formulas, once for a sweep.

Nothing here stops a run. A formula whose figures are not known says nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.base.units import ELEMENT_BYTES, GIB
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.combinations import TRANSFORMER, refused
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.errors import HpctrainError
from hpctrain.insight.estimates import right_size
from hpctrain.insight.estimates.advice import CORES_PER_GPU, cures
from hpctrain.insight.estimates.hardware import Hardware, of_section
from hpctrain.insight.estimates.measured_run import runs_of_model
from hpctrain.insight.estimates.memory_fit import on_gpu


def of_sweep(configs: Iterable[Config]) -> list[str]:
    """Return the warnings of all runs, each once."""
    kinds: dict[str, Config] = {}
    for config in configs:
        optimizer = config.optimizer._target_, config.optimizer.options, config.optimizer.groups
        sections = config.model, config.launch, config.train, config.parallel, config.precision
        kinds.setdefault(repr((optimizer, *sections, config.hardware, config.data)), config)
    return [*dict.fromkeys(text for config in kinds.values() for text in cautions(config))]


def cautions(config: Config) -> Iterator[str]:
    """Yield the warnings of one run."""
    try:
        hardware = of_section(config.hardware) if config.hardware else None
        degrees = Degrees.of(config.parallel, config.asked_world_sizes.start)
        BatchSizes.of(config.train, config.parallel, degrees)
    except HpctrainError:  # a range of nodes may fit only with other numbers than its first
        return
    yield from refused(config, "idle_keys")
    yield from _cores(config.launch)
    yield from right_size.note(config)
    yield from _across_nodes(degrees, config.launch.tasks_per_node, config.parallel.ep)
    if hardware is not None and config.parallel.device != "cpu":
        yield from _states(config, degrees, hardware)


def _cores(launch: LaunchConfig) -> Iterator[str]:
    gpus = launch.gpus_per_node
    if gpus and launch.cpus_per_task * launch.tasks_per_node < CORES_PER_GPU * gpus:
        least = -(-CORES_PER_GPU * gpus // launch.tasks_per_node)
        yield (
            f"launch.cpus_per_task={launch.cpus_per_task}: fewer than {CORES_PER_GPU} cores per "
            "GPU, so that loading data and starting kernels take turns; use "
            f"launch.cpus_per_task={least} or more"
        )


def _across_nodes(degrees: Degrees, per_node: int, ep: int) -> Iterator[str]:
    if degrees.ranks <= per_node:
        return
    within = f"use parallel.tp={per_node} or less, and pp or dp_shard beyond"
    for key, degree, what in (
        ("tp", degrees.tp, f"every layer waits for the network; {within}"),
        ("ep", ep, "layers with experts exchange their tokens over the network"),
    ):
        if degree > per_node:
            yield f"parallel.{key}={degree} spans several nodes of {per_node} ranks: {what}"


def _states(config: Config, degrees: Degrees, hardware: Hardware) -> Iterator[str]:
    """Yield a warning if parameters and their states alone do not fit on a GPU."""
    parallel, share = config.parallel, config.launch.gpus_per_run
    # How many weights are packed in 4 bits, or kept on the host, is not known here.
    unknown = parallel.ep > 1 or config.train.lora.quantize or parallel.fsdp.offload
    if hardware.memory_bytes is None or unknown:
        return
    memory = int(hardware.memory_bytes * (share or 1))
    machine = f"{share:g} of hardware={hardware.name}" if share else f"hardware={hardware.name}"
    count = parameter_count(config.model)
    if count is None:
        known = runs_of_model(config.model, config.output_dir)
        count = next((run.parameters for run in known if run.parameters), None)
    if count is None:
        return
    # Frozen parameters have no state, and how many they are is not known here.
    partly = any(group.get("freeze") for group in config.optimizer.groups)
    partly |= config.train.lora.match is not None
    # Gradients on a GPU come as activations go.
    states = 0 if partly else config.optimizer.states
    ranks = degrees.tp * degrees.pp * degrees.shards(parallel)
    needed = count * ELEMENT_BYTES[config.precision.params] * (1 + states) / ranks
    optimizer = config.optimizer._target_.rpartition(".")[2]
    of_model = f"{count:,} parameters" + f" and the state of {optimizer}" * (states > 0)
    if on_gpu(needed, memory, complete=False).possible is False:
        yield (
            f"does not fit: {of_model} alone take "
            f"{needed / GIB:.1f} GiB on each rank (divided by {ranks}), and "
            f"{machine} has {memory / GIB:.1f} GiB: "
            f"{cures('states', config, degrees.ranks) or 'ask for more launch.nodes'}; "
            "`python -m hpctrain plan` shows layouts that fit"
        )


def parameter_count(model: Mapping[str, Any]) -> int | None:
    """Return the number of parameters, each counted once; None if the config does not tell it.

    It tells those of our own Transformer. Other models have to be built to be counted, which takes
    torch. An earlier run knows them, too.
    """
    try:
        if model.get("_target_") in TRANSFORMER:
            return _of_transformer(model)
    except (KeyError, TypeError, ZeroDivisionError):  # it is wrong: building it says what
        pass
    return None


def _of_transformer(model: Mapping[str, Any]) -> int:
    dim, layers, vocabulary = model["dim"], model["layers"], model["vocab_size"]
    hidden, gelu = model.get("hidden"), model.get("mlp") == "gelu"
    if hidden is None:
        hidden = 4 * dim if gelu else -(-8 * dim // (3 * 32)) * 32
    heads, bias = model["heads"], bool(model.get("bias"))
    width = (model.get("kv_heads") or heads) * (dim // heads)  # of keys, and of values
    attention = 2 * dim * dim + 2 * dim * width + bias * (2 * dim + 2 * width)
    norm = dim * (2 if bias and model.get("norm", "rms") == "layer" else 1)
    dense = _mlp(dim, hidden, bias, 2 if gelu else 3)
    mixed, without = dense, layers
    if (experts := model.get("experts")) is not None:
        wide, shared = model.get("expert_hidden") or hidden, model.get("shared_experts", 0)
        mixed = experts * (dim + _mlp(dim, wide, False, 3))
        mixed += _mlp(dim, shared * wide, bias, 3) if shared else 0
        without = min(layers, model.get("dense_layers", 0))
    blocks = layers * (attention + 2 * norm) + without * dense + (layers - without) * mixed
    tables = vocabulary * dim * (1 if model.get("tied") else 2)
    positions = (model.get("learned_positions") or 0) * dim
    return int(blocks + tables + positions + norm)


def _mlp(dim: int, hidden: int, bias: bool, matrices: int) -> int:
    return matrices * dim * hidden + bias * ((matrices - 1) * hidden + dim)
