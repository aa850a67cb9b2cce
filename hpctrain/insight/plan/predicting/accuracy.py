"""How far predictions are from published runs, by class (docs/published.md has each of them).

Only runs of sources that have set no constant count. tests/plan makes the numbers of errors.yaml.
"""

from pathlib import Path

from hpctrain.base.files import yaml_file
from hpctrain.config.schema import Config
from hpctrain.insight.estimates.hardware import Hardware, known
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts
from hpctrain.insight.plan.layouts import Layout

_FOUND = yaml_file.read(Path(__file__).with_name("errors.yaml"))  # which explains the numbers
SPEED: dict[str, list[int]] = _FOUND["speed"]
BY_GPU: dict[str, list[int]] = _FOUND["by gpu"]
MEMORY: list[int] = _FOUND["memory"]
# What published runs had: kinds of data parallel, and ways to divide the model, alone or together.
COMPARED = frozenset(("ddp", "zero1", "zero3", "hsdp", "single"))
_DIVIDE = ("cp", "tp", "pp", "ep")
TOGETHER = frozenset(("", "tp", "cp", "pp", "ep", "tp+pp", "pp+ep"))


def class_of(facts: ModelFacts, training: Config) -> str:
    """Return the class of a training: the kind of its model, and its format."""
    lora, compute = training.train.lora, training.precision.compute
    kind = "images" if not facts.tokens else "experts" if facts.experts else "dense"
    if lora.patterns:
        kind = "QLoRA" if lora.quantize else "LoRA"
    return f"{kind} {'bf16' if compute == 'fp16' else compute}"


def accuracy(facts: ModelFacts, training: Config, hardware: Hardware) -> dict[str, str]:
    """Return how far predictions of this class, of this GPU, and of memory were from such runs."""
    name = class_of(facts, training)
    of_class, of_gpu = _errors(SPEED.get(name)), _errors(BY_GPU.get(hardware.name))
    return {
        "off published runs": f"{name}: {of_class}; {hardware.title}, all classes: {of_gpu}",
        "memory off published runs": f"{_errors(MEMORY)} of all classes",
    }


def _errors(of: list[int] | None) -> str:
    if of is None:
        return "no published run was compared"
    runs, median, high, worst = of
    if runs == 1:
        return f"{median}% off the only published run that was compared"
    rest = f"{high}% at the 90th percentile, {worst}% at worst of {runs} published runs"
    return f"{median}% median, {rest}"


def is_covered(hardware: Hardware) -> bool:
    """Return whether a published run on such a GPU was compared, or its owner knows its speed."""
    own = hardware.matmul_efficiency is not None and hardware.name not in known()
    return own or hardware.name in BY_GPU


def uncompared(layout: Layout) -> str:
    """Return what of a layout no published run had, such as "offload and cp+pp", or ""."""
    kinds, together = parts_of(layout)
    missing = [kind for kind in kinds if kind not in COMPARED]
    return " and ".join([*missing, *([] if together in TOGETHER else [together])])


def parts_of(layout: Layout) -> tuple[list[str], str]:
    """Return the kind of data parallel, and offload; and the ways to divide the model: "tp+pp"."""
    parts = [(part, part.rstrip("0123456789")) for part in layout.kind.split("+")]
    kinds = [part for part, name in parts if name not in _DIVIDE]
    return kinds, "+".join(name for _, name in parts if name in _DIVIDE)
