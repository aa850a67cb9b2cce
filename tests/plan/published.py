"""Published runs with their speed, and what `plan` predicts for them.

    torchtitan    github.com/pytorch/torchtitan, docs/performance.md (2024; A100 of 80 GB) and
                  benchmarks/llama3_h100_202412_torchtitan.md (H100 of 2.4 TB/s, 500 W)
    llm-foundry   github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (2023; MPT):
                  every row in amp_bf16 of 2,048 and of 8,192 tokens with 760 M parameters or more
    Llama 3       Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 4
    Megatron-LM   Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
                  Clusters", table 1: before flash attention, so it is a list of its own

The runs with `calibrates` have set the constants; the others have not been looked at for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from hpctrain.config.schema import Config
from hpctrain.hardware import Hardware, load
from hpctrain.models import Transformer
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.plan.inspecting.activations import Activations, activations_of
from hpctrain.plan.inspecting.model_facts import ModelFacts, facts_of
from hpctrain.plan.layouts import Layout
from hpctrain.plan.predicting.timing import Efficiencies, StepTime, step_time
from hpctrain.tasks import LanguageModel

TORCHTITAN, MOSAIC, LLAMA, MEGATRON = "torchtitan", "llm-foundry", "Llama 3", "Megatron-LM"


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source: Who has published it.
        model: A name in `MODELS`.
        hardware: A name in `conf/hardware`, or `h100_500w`.
        gpus: The GPUs, in nodes of 8.
        length: The tokens of a sample.
        micro: The samples of a micro-batch.
        accumulate: The micro-batches of a step.
        checkpointing: `train.activation_checkpointing`.
        speed: Tokens per second and GPU; of the papers it is MFU in percent.
        compiled: Whether torch.compile is used.
        degrees: `tp`, `pp` and the schedule. Empty is FSDP over all GPUs.
        calibrates: Whether the run has set the constants.
    """

    source: str
    model: str
    hardware: str
    gpus: int
    length: int
    micro: int
    accumulate: int
    checkpointing: str
    speed: float
    compiled: bool = False
    degrees: dict[str, Any] = field(default_factory=dict)
    calibrates: bool = False


def _llama(dim: int, layers: int, heads: int, kv: int, hidden: int, words: int) -> Any:
    return partial(Transformer, words, dim, layers, heads, kv, hidden)


def _gpt(dim: int, layers: int, heads: int, words: int = 50368) -> Any:
    return partial(Transformer, words, dim, layers, heads, norm="layer", mlp="gelu", tied=True)


MODELS: dict[str, Callable[[], Transformer]] = {
    "Llama 3 8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama 3 70B": _llama(8192, 80, 64, 8, 28672, 128256),
    "Llama 3 405B": _llama(16384, 126, 128, 8, 53248, 128256),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 70B": _llama(8192, 80, 64, 8, 28672, 32000),
    "MPT 70b": _gpt(8192, 80, 64),
    "MPT 30b": _gpt(7168, 48, 56),
    "MPT 13b": _gpt(5120, 40, 40),
    "MPT 7b": _gpt(4096, 32, 32),
    "MPT 3b": _gpt(2560, 32, 20),
    "MPT 1b": _gpt(2048, 24, 16),
    "MPT 760m": _gpt(1536, 24, 12),
    "GPT 3.6B": _gpt(3072, 30, 32, 51200),
    "GPT 18.4B": _gpt(6144, 40, 48, 51200),
    "GPT 76.1B": _gpt(10240, 60, 80, 51200),
    "GPT 145.6B": _gpt(12288, 80, 96, 51200),
}

A, H, COLD = "a100_80", "h100_sxm", "h100_500w"
_405B = {"zero": 1, "tp": 8, "pp": 16, "schedule": "interleaved"}
RUNS = [
    Run(TORCHTITAN, "Llama 3 8B", A, 64, 8192, 1, 1, "selective", 2973, calibrates=True),
    Run(TORCHTITAN, "Llama 3 70B", A, 64, 8192, 1, 1, "full", 331, calibrates=True),
    Run(TORCHTITAN, "Llama 3 8B", COLD, 8, 8192, 2, 1, "selective", 5762, calibrates=True),
    Run(TORCHTITAN, "Llama 3 8B", COLD, 8, 8192, 2, 1, "selective", 6667, True, calibrates=True),
    Run(MOSAIC, "MPT 7b", H, 8, 2048, 6, 1, "none", 10643),
    Run(MOSAIC, "MPT 1b", H, 8, 8192, 3, 4, "none", 29157),
    Run(MOSAIC, "MPT 30b", H, 16, 2048, 10, 3, "full", 2263),
    Run(MOSAIC, "MPT 7b", A, 8, 2048, 6, 2, "none", 4641),
    Run(MOSAIC, "MPT 1b", A, 8, 8192, 3, 4, "none", 13814),
    Run(TORCHTITAN, "Llama 2 13B", A, 64, 4096, 2, 1, "none", 2162),
    Run(TORCHTITAN, "Llama 2 13B", A, 64, 4096, 2, 1, "selective", 1904),
    Run(TORCHTITAN, "Llama 2 70B", A, 64, 4096, 1, 1, "selective", 355),
    Run(TORCHTITAN, "Llama 2 70B", A, 64, 4096, 2, 1, "full", 353),
    Run(TORCHTITAN, "Llama 3 8B", COLD, 128, 8192, 2, 1, "selective", 5605),
    Run(TORCHTITAN, "Llama 3 8B", COLD, 128, 8192, 2, 1, "selective", 6514, True),
    Run(MOSAIC, "MPT 70b", H, 64, 2048, 8, 4, "full", 1039),
    Run(MOSAIC, "MPT 70b", H, 32, 2048, 2, 16, "full", 882),
    Run(MOSAIC, "MPT 30b", H, 8, 8192, 1, 21, "full", 1384),
    Run(MOSAIC, "MPT 30b", H, 32, 2048, 14, 3, "full", 2308),
    Run(MOSAIC, "MPT 30b", H, 8, 2048, 3, 21, "full", 2002),
    Run(MOSAIC, "MPT 13b", H, 64, 2048, 2, 1, "none", 4800),
    Run(MOSAIC, "MPT 13b", H, 32, 2048, 2, 1, "none", 4811),
    Run(MOSAIC, "MPT 13b", H, 16, 2048, 2, 1, "none", 4767),
    Run(MOSAIC, "MPT 13b", H, 8, 2048, 2, 1, "none", 4792),
    Run(MOSAIC, "MPT 7b", H, 8, 8192, 8, 2, "full", 6935),
    Run(MOSAIC, "MPT 3b", H, 8, 8192, 3, 6, "none", 16578),
    Run(MOSAIC, "MPT 3b", H, 64, 2048, 6, 3, "none", 22525),
    Run(MOSAIC, "MPT 3b", H, 32, 2048, 6, 3, "none", 23021),
    Run(MOSAIC, "MPT 3b", H, 16, 2048, 10, 3, "none", 24142),
    Run(MOSAIC, "MPT 1b", H, 64, 2048, 20, 1, "none", 44402),
    Run(MOSAIC, "MPT 1b", H, 32, 2048, 20, 1, "none", 45130),
    Run(MOSAIC, "MPT 1b", H, 16, 2048, 20, 1, "none", 46037),
    Run(MOSAIC, "MPT 1b", H, 8, 2048, 14, 1, "none", 45455),
    Run(MOSAIC, "MPT 760m", H, 8, 8192, 6, 2, "none", 41825),
    Run(MOSAIC, "MPT 760m", H, 32, 2048, 24, 1, "none", 67971),
    Run(MOSAIC, "MPT 760m", H, 16, 2048, 24, 1, "none", 68551),
    Run(MOSAIC, "MPT 760m", H, 8, 2048, 24, 2, "none", 63147),
    Run(MOSAIC, "MPT 30b", A, 8, 8192, 1, 21, "full", 574),
    Run(MOSAIC, "MPT 30b", A, 8, 2048, 3, 21, "full", 916),
    Run(MOSAIC, "MPT 13b", A, 8, 8192, 5, 3, "full", 1795),
    Run(MOSAIC, "MPT 13b", A, 8, 2048, 2, 3, "none", 2262),
    Run(MOSAIC, "MPT 7b", A, 8, 8192, 8, 2, "full", 3206),
    Run(MOSAIC, "MPT 3b", A, 8, 8192, 3, 6, "none", 7695),
    Run(MOSAIC, "MPT 3b", A, 8, 2048, 10, 2, "none", 10811),
    Run(MOSAIC, "MPT 1b", A, 8, 2048, 14, 4, "none", 20513),
    Run(MOSAIC, "MPT 760m", A, 8, 8192, 6, 2, "none", 20933),
    Run(MOSAIC, "MPT 760m", A, 8, 2048, 24, 2, "none", 32434),
    Run(LLAMA, "Llama 3 405B", H, 8192, 8192, 1, 32, "none", 43, degrees=_405B, calibrates=True),
    Run(LLAMA, "Llama 3 405B", H, 16384, 8192, 1, 16, "none", 41, degrees=_405B),
]


def of_megatron() -> list[Run]:
    """Return the older runs; their MFU is 3/4 of the share of the peak that the paper states."""
    rows = [
        ("GPT 3.6B", 64, 2, 1, 512, 44),
        ("GPT 18.4B", 256, 8, 1, 1024, 43),
        ("GPT 76.1B", 1024, 8, 4, 1792, 45),
        ("GPT 145.6B", 1536, 8, 8, 2304, 47),
    ]
    return [
        Run(
            *(MEGATRON, model, A, gpus, 2048, 1, batch * tp * pp // gpus, "full", 0.75 * share),
            degrees={"zero": 1, "tp": tp, "pp": pp},
        )
        for model, gpus, tp, pp, batch, share in rows
    ]


@cache
def inspected(model: str, length: int) -> tuple[ModelFacts, Activations, int]:
    """Return the facts of a model, its activations without checkpointing, and its blocks."""
    shape = (1, length + 1)
    sample = {
        "tokens": torch.empty(shape, dtype=torch.int64, device="meta"),
        "mask": torch.empty(1, dtype=torch.bool, device="meta"),
    }
    with torch.device("meta"):
        made = MODELS[model]()
    task, train = LanguageModel(), Config().train
    kept = activations_of(MODELS[model], task, sample, torch.bfloat16, train)
    return facts_of(made, task, sample), kept, len(find_blocks(made, []))


def hardware_of(run: Run) -> Hardware:
    """Return the hardware of a run. torchtitan's H100 have other memory and less power."""
    if run.hardware != COLD:
        return load(run.hardware)
    return replace(load(H), memory_bandwidth=2.4e12, matmul_efficiency=0.40)


def predicted(run: Run, efficiencies: Efficiencies | None = None) -> StepTime:
    """Return the predicted time of a step."""
    config = Config()
    degrees = {"zero": 3, "tp": 1, "pp": 1} | run.degrees
    schedule = degrees.pop("schedule", "1f1b")
    for key, value in degrees.items():
        setattr(config.parallel, key, value)
    config.parallel.pipeline.schedule = schedule
    config.parallel.dp_replicate, config.parallel.dp_shard = 1, -1
    config.precision.compute = "bf16"
    config.launch.nodes, config.launch.tasks_per_node = max(1, run.gpus // 8), min(8, run.gpus)
    train, shares = config.train, run.gpus // (degrees["tp"] * degrees["pp"])
    train.global_batch_size = run.micro * run.accumulate * shares
    train.accumulate, train.activation_checkpointing = run.accumulate, run.checkpointing
    train.compile = "blocks" if run.compiled else "off"
    layout = Layout(config, config.launch.node_numbers.start, ())
    facts, kept, blocks = inspected(run.model, run.length)
    time = step_time(layout, facts, kept, blocks, hardware_of(run), efficiencies or Efficiencies())
    assert time is not None
    return time


def speed_of(run: Run, time: StepTime) -> float:
    """Return a prediction in the unit of `run.speed`."""
    if run.source in (LLAMA, MEGATRON):
        return 100 * time.mfu
    shares = run.gpus // (run.degrees.get("tp", 1) * run.degrees.get("pp", 1))
    return run.micro * run.accumulate * shares * run.length / time.step_s / run.gpus


_NAMES = {A: "A100", H: "H100", COLD: "H100 of 500 W"}


def beginning(run: Run) -> str:
    """Return the first cells of the row of a run in docs/plan.md: what it is, and its speed."""
    parts = [f"{run.source}: {run.model}", f"{run.gpus:,} {_NAMES[run.hardware]}"]
    parts += [f"{run.length:,} tokens x {run.micro} x {run.accumulate}"]
    parts += [f"{name} {run.degrees[name]}" for name in ("tp", "pp") if name in run.degrees]
    parts += [] if run.checkpointing == "none" else [run.checkpointing]
    parts += ["compile"] if run.compiled else []
    return f"| {', '.join(parts)} | {shown(run, run.speed)} |"


def row(run: Run) -> str:
    """Return the row of a run in docs/plan.md."""
    value = speed_of(run, predicted(run))
    return f"{beginning(run)} {shown(run, value)} | {100 * (value / run.speed - 1):+.1f} % |"


def shown(run: Run, value: float) -> str:
    """Return a speed with its unit if that is not tokens per second and GPU."""
    mfu = run.source in (LLAMA, MEGATRON)
    return f"{value:.1f} % MFU" if mfu else f"{value:,.0f}"
