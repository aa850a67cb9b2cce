"""How far predictions are from published runs, by class (docs/published.md has each of them).

Only runs of sources that have set no constant count. tests/plan makes the numbers.
"""

from hpctrain.insight.estimates.hardware import Hardware, known
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.planned import PlannedTraining

# Made by `python -m tests.plan.published_page`: the number of runs, then the median, the 90th
# percentile and the largest of their errors in percent. 100 is twice, or half, as fast. BY_GPU has
# the names of conf/hardware.
SPEED: dict[str, tuple[int, ...]] = {
    "LoRA bf16": (1, 3, 3, 3),
    "QLoRA bf16": (1, 2, 2, 2),
    "dense bf16": (28, 11, 22, 37),
    "dense fp8": (8, 4, 33, 33),
    "experts bf16": (3, 71, 88, 88),
    "experts fp8": (1, 47, 47, 47),
    "images bf16": (16, 18, 43, 45),
    "images tf32": (5, 2, 47, 47),
}
BY_GPU: dict[str, tuple[int, ...]] = {
    "a100_40": (1, 8, 8, 8),
    "a100_80": (12, 8, 20, 31),
    "h100_sxm": (15, 10, 47, 88),
    "h100_pcie": (2, 3, 5, 5),
    "h200": (17, 9, 23, 37),
    "b200": (2, 38, 71, 71),
    "rtx_4090": (3, 30, 35, 35),
    "rtx_a6000": (2, 41, 47, 47),
}
MEMORY = (19, 8, 22, 23)
# What published runs had: kinds of data parallel, and ways to divide the model, alone or together.
COMPARED = frozenset(("ddp", "zero1", "zero3", "hsdp", "single"))
_DIVIDE = ("cp", "tp", "pp", "ep")
TOGETHER = frozenset(("", "tp", "cp", "pp", "ep", "tp+pp", "pp+ep"))


def class_of(facts: ModelFacts, training: PlannedTraining) -> str:
    """Return the class of a training: the kind of its model, and its format."""
    lora, compute = training.train.lora, training.precision.compute
    kind = "images" if not facts.tokens else "experts" if facts.experts else "dense"
    if lora.patterns:
        kind = "QLoRA" if lora.quantize else "LoRA"
    return f"{kind} {'bf16' if compute == 'fp16' else compute}"


def accuracy(facts: ModelFacts, training: PlannedTraining, hardware: Hardware) -> str:
    """Return how far predictions of this class, and of this GPU, have been from published runs."""
    name = class_of(facts, training)
    of_class, of_gpu = _errors(SPEED.get(name)), _errors(BY_GPU.get(hardware.name))
    return f"{name}: {of_class}; {hardware.title}, all classes: {of_gpu}"


def memory_accuracy() -> str:
    """Return how far predictions of the memory have been from published runs."""
    return f"{_errors(MEMORY)} of all classes"


def _errors(of: tuple[int, ...] | None) -> str:
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
