"""How far predictions are from published runs, by class (docs/published.md has each of them).

Only runs of sources that have set no constant count. tests/plan makes the numbers.
"""

from hpctrain.config.schema import Config
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.layouts import Layout

# Made by `python -m tests.plan.published_page`: the number of runs, then the median, the 90th
# percentile and the largest of their errors in percent. 100 is twice, or half, as fast.
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
MEMORY = (19, 8, 22, 23)
# What published runs had: kinds of data parallel, and ways to divide the model, alone or together.
COMPARED = frozenset(("ddp", "zero1", "zero3", "hsdp", "single"))
_DIVIDE = ("cp", "tp", "pp", "ep")
TOGETHER = frozenset(("", "tp", "cp", "pp", "ep", "tp+pp", "pp+ep"))


def class_of(facts: ModelFacts, config: Config) -> str:
    """Return the class of a training: the kind of its model, and its format."""
    lora, compute = config.train.lora, config.precision.compute
    kind = "images" if not facts.tokens else "experts" if facts.experts else "dense"
    if lora.patterns:
        kind = "QLoRA" if lora.quantize else "LoRA"
    return f"{kind} {'bf16' if compute == 'fp16' else compute}"


def accuracy(facts: ModelFacts, config: Config) -> str:
    """Return how far predictions of this class have been from published runs."""
    name = class_of(facts, config)
    if name not in SPEED:
        return f"{name}: no published run was compared with this class"
    runs, median, _, worst = SPEED[name]
    if runs == 1:
        return f"{name}: {median}% off the only published run that was compared"
    return f"{name}: {median}% median, {worst}% at worst of {runs} published runs"


def memory_accuracy() -> str:
    """Return how far predictions of the memory have been from published runs."""
    runs, median, _, worst = MEMORY
    return f"{median}% median, {worst}% at worst of {runs} published runs of all classes"


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
