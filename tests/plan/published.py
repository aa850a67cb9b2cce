"""Published runs with their speed and memory, and what `plan` predicts for them.

    published.csv ── Run ── predicted() ── speed_of(), errors by class ── docs/published.md

Sources are divided into those that may set constants and those that only judge (referees), each
source as a whole. The columns of published.csv: `fused` is torch.compile, or hand-written kernels
that fuse as much; `params` the format of the parameters; `length` the tokens of a sample (0:
images of 224 x 224); `degrees` those of the layout (zero3 without), with `between`, the GB/s of a
GPU to other nodes where the source says so, and `lora`, the rank of adapters of all linear layers
of the blocks; `checkpointing` half where every second product is computed again (torchtitan), or
a part of the blocks (fms-fsdp); speeds are per GPU; `gib` is the peak of a GPU; `apart` why a run
counts in no class:

    old         attention that writes its whole square, as before flash attention
    padded      experts that all get as many tokens as the busiest one
    unverified  the source does not say what the row needs, or contradicts itself
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hpctrain.config.schema import Config, LoRAConfig
from hpctrain.engine.distributed.devices import CONTEXT_BYTES
from hpctrain.insight.estimates.hardware import Hardware, load
from hpctrain.insight.plan.inspecting.activations import MeasuredActivations
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts, facts_of
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.predicting.rank_memory import MemoryModel
from hpctrain.insight.plan.predicting.timing import Efficiencies, StepTime, step_time
from hpctrain.tasks import Classification, LanguageModel
from tests.plan.published_models import LOSSES, MODELS, Build, adapted


@dataclass(frozen=True)
class Source:
    """Where runs were published, and whether they may set constants."""

    url: str
    date: str
    calibrates: bool
    memory: str = "allocated"  # or "reserved" by the allocator, which has gaps
    loss: str = "parts"  # how it is computed: tests.plan.published_models.LOSSES
    loss_parallel: bool = True
    reduced: str | None = None  # the format in which gradients are added; None: that of parameters
    sync: str = "auto"  # last: gradients stay whole until the last micro-batch


SOURCES = {
    "torchtitan": Source(
        "github.com/pytorch/torchtitan: docs/performance.md (A100), and "
        "benchmarks/llama3_h100_202412_torchtitan.md (H100 of 2.4 TB/s and 500 W)",
        *("2024-12-26", True, "reserved", "float32"),
    ),
    "llm-foundry": Source(
        "github.com/mosaicml/llm-foundry: scripts/train/benchmarking/README.md, the rows of 2,048 "
        "and 8,192 tokens, in fp8 also 512; submit_benchmarks.py (PURE: gradients in bf16)",
        *("2023", True),
        reduced="bf16",
    ),
    "Llama 3": Source("arxiv.org/abs/2407.21783, table 4", "2024-07", True),
    "AutoModel": Source(
        "github.com/NVIDIA-NeMo/Automodel: docs/performance-summary.md, and the recipes it names",
        *("2025-10-02, 2026-04-17", True),
    ),
    "DeepLearningExamples": Source(
        "github.com/NVIDIA/DeepLearningExamples: PyTorch/Classification/ConvNets, the READMEs of "
        "resnet50v1.5 and resnext101-32x4d, and configs.yml",
        *("2021-03, 2020-06", True),
    ),
    "litgpt": Source(
        "github.com/Lightning-AI/litgpt: tutorials/resource-tables.md", "2023-10-20", True
    ),
    "fms-fsdp": Source(
        "github.com/foundation-model-stack/fms-fsdp: README.md, with links of 400 and 800 Gb/s for "
        "a node; gradients in bf16",
        *("2024", False),
        reduced="bf16",
    ),
    "KempnerForge": Source(
        "github.com/KempnerInstitute/KempnerForge: benchmarks/mfu_scaling (micro-batches of "
        "mfu_bench.sh, where the report has others), weak_scaling_160gpu, 175b_360gpu and "
        "moe_packed (nodes of four GPUs), training/grad.py and distributed/parallel.py (gradients "
        "are added in fp32, after the last micro-batch), scripts/train.py and "
        "distributed/tensor_parallel.py (the loss of whole logits on each rank), metrics/memory.py "
        "(what is allocated) and model/moe.py of April (experts are padded to the busiest one)",
        *("2026-04 to 2026-07", False, "allocated", "whole", False, "fp32", "last"),
    ),
    "TinyLlama": Source("github.com/jzhang38/TinyLlama: README.md", "2023-09", False),
    "nanoGPT": Source(
        "github.com/karpathy/nanoGPT: README.md (600,000 steps in about 4 days, before torch's "
        "flash attention), and issue 182 (29 % of an A100's peak on a 4090)",
        *("2022-12, 2023-03", False),
    ),
    "NeMo": Source(
        "github.com/NVIDIA/NeMo 24.07: docs/source/performance/performance_summary.md, and "
        "docs.nvidia.com/nemo-framework: Vit/Perf.html, whose recipe "
        "(github.com/NVIDIA/NeMo-Framework-Launcher: training/vit/g_14.yaml) has a fused softmax "
        "in place of flash attention, and no fused GELU",
        *("2024-07", False),
    ),
    "Megatron-Bridge": Source(
        "github.com/NVIDIA-NeMo/Megatron-Bridge: docs/performance-summary.md, 25.09 and 26.02.01",
        *("2025-09, 2026-02", False),
    ),
    "Megatron-Core MoE": Source(
        "github.com/NVIDIA/Megatron-LM: megatron/core/transformer/moe/README.md (v0.9), "
        "arxiv.org/abs/2504.14960, and github.com/yanring/Megatron-MoE-ModelZoo: "
        "best_practice/Qwen3/readme.md",
        *("2024-12 to 2025-12", False),
    ),
    "torchtune": Source(
        "github.com/pytorch/torchtune: README.md, both tables; of several GPUs, the sum. Llama 3.1 "
        "says nothing of checkpointing and offloading, and its LoRA leaves 1.2 GiB beside 15.0 GiB "
        "of weights",
        *("2024-09, 2025-05", False, "allocated", "fused"),
    ),
    "Trainy": Source(
        "github.com/pytorch/torchtitan: benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        *("2025-06", False, "reserved", "fused"),
    ),
    "Lambda": Source(
        "github.com/lambdal/deeplearning-benchmark: pytorch/pytorch-train-throughput-fp16.csv, "
        "-fp32.csv, -bs-*.csv, and scripts/config_v1 (main.py of DeepLearningExamples with "
        "channels first, synthetic images)",
        *("2023", False),
    ),
    "timm": Source(
        "github.com/huggingface/pytorch-image-models: "
        "results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv, and -nchw-",
        *("2022", False),
    ),
    "Megatron-LM": Source("arxiv.org/abs/2104.04473, table 1", "2021-04", False),
}
_NUMBERS = ("gpus", "per_node", "length", "micro", "accumulate")


@dataclass(frozen=True)
class Run:
    """A row of published.csv."""

    source: str
    model: str
    hardware: str
    gpus: int
    per_node: int
    compute: str
    params: str
    length: int
    micro: int
    accumulate: int
    checkpointing: str
    fused: bool
    degrees: tuple[tuple[str, str], ...]
    unit: str  # tok, img, mfu (%), tflops
    speed: float | None
    gib: float | None
    apart: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> Run:
        row |= {name: int(row[name]) for name in _NUMBERS} | {"fused": row["fused"] == "x"}
        row |= {name: float(row[name]) if row[name] else None for name in ("speed", "gib")}
        named = (part.partition("=")[::2] for part in row["degrees"].split())
        return cls(**row | {"degrees": tuple(named)})

    @property
    def calibrates(self) -> bool:
        return SOURCES[self.source].calibrates

    @property
    def refused(self) -> bool:
        """Whether hpctrain has no such layout, so that `plan` never answers for it."""
        degrees = dict(self.degrees)
        alone = "ep" in degrees or self.compute == "fp8"
        return ("tp" in degrees and alone) or ("lora" in degrees and self.compute == "fp8")

    @property
    def shares(self) -> int:
        whole = 1
        for name, value in self.degrees:
            whole *= int(value) if name in ("tp", "pp", "cp") else 1
        return self.gpus // whole

    @property
    def config(self) -> Config:
        """The config of the run."""
        config, degrees = Config(model={"_target_": "any"}), dict(self.degrees)
        parallel, train = config.parallel, config.train
        for name in ("zero", "tp", "pp", "cp", "ep"):
            setattr(parallel, name, int(degrees.get(name, 3 if name == "zero" else 1)))
        parallel.pipeline.schedule = degrees.get("schedule", "1f1b")
        parallel.dp_replicate, parallel.dp_shard = 1, -1
        if "ddp" in degrees or self.gpus == 1:
            parallel.dp_replicate, parallel.dp_shard = -1, 1
        if "hsdp" in degrees:
            parallel.dp_replicate, parallel.dp_shard = -1, self.per_node
        config.precision.compute, config.precision.params = self.compute, self.params
        config.precision.reduce = SOURCES[self.source].reduced
        parallel.sync = SOURCES[self.source].sync
        parallel.loss_parallel = SOURCES[self.source].loss_parallel
        nodes = self.gpus // self.per_node
        config.launch.nodes, config.launch.tasks_per_node = nodes, self.per_node
        train.global_batch_size = self.micro * self.accumulate * self.shares
        train.accumulate = self.accumulate
        train.activation_checkpointing = self.checkpointing.replace("half", "selective")
        train.compile = "blocks" if self.fused else "off"
        # Few sources say whether the step of their optimizer was fused: the larger memory counts.
        config.optimizer.options = {"fused": False}
        if not self.length:
            config.optimizer._target_ = "torch.optim.SGD"
            config.optimizer.options = {"momentum": 0.9}
        if "lora" in degrees:
            train.lora = _lora(degrees)
        return config

    @property
    def machine(self) -> Hardware:
        """The hardware: that of conf/hardware, or what the source says of another one."""
        link = dict(self.degrees).get("between")
        if self.hardware == "h100_500w":
            return replace(load("h100_sxm"), memory_bandwidth=2.4e12, matmul_efficiency=0.57)
        if self.hardware == "rtx_3090":  # NVIDIA's GA102 white paper, appendix A: sums in fp32
            peaks = {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}
            # github.com/mli/transformers-benchmarks: 81 of the 80 TFLOPS of a 3090 Ti.
            ampere = {"peak_flops": peaks, "memory_bandwidth": 936e9}
            return replace(load("rtx_a6000"), **ampere, matmul_efficiency=1.0)
        if self.hardware == "v100":  # NVIDIA V100 data sheet; 95 of 125 TFLOPS, same source
            volta = {"peak_flops": {"fp16": 125e12}, "memory_bandwidth": 900e9}
            return replace(load("a100_40"), **volta, matmul_efficiency=0.76)
        found = load(self.hardware)
        if link is None:
            return found
        return replace(found, between=replace(found.between, bandwidth=float(link) * 1e9))


def _lora(degrees: dict[str, str]) -> LoRAConfig:
    return LoRAConfig(
        match=["layers.*.attention.*", "layers.*.mlp.*"],
        rank=int(degrees["lora"]),
        quantize="nf4" if "nf4" in degrees else None,
    )


def runs() -> list[Run]:
    """Return all rows."""
    with (Path(__file__).parent / "published.csv").open() as file:
        return [Run.of(row) for row in csv.DictReader(file)]


@dataclass(frozen=True)
class Inspected:
    """What `plan` knows of a model: a task, a sample, and a function that makes it."""

    build: Build
    task: Any
    sample: dict[str, torch.Tensor]
    facts: ModelFacts
    known: dict[tuple[str, str], MeasuredActivations] = field(default_factory=dict)

    def measured(self, compute: str, loss: str = "parts") -> MeasuredActivations:
        compute = compute.replace("fp8", "bf16")
        if (compute, loss) not in self.known:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)
            task = LOSSES[loss]() if loss in LOSSES else self.task
            measured = MeasuredActivations(self.build, task, self.sample, dtype)
            self.known[compute, loss] = measured
        return self.known[compute, loss]


@cache
def inspected(model: str, length: int, lora: tuple[tuple[str, str], ...] = ()) -> Inspected:
    """Return what is known of a model."""
    build = MODELS[model]
    if lora:
        build = partial(adapted, build, _lora(dict(lora)))
    sample = {"mask": torch.empty(1, dtype=torch.bool, device="meta")}
    if length:
        sample["tokens"] = torch.empty((1, length + 1), dtype=torch.int64, device="meta")
    else:
        sample["image"] = torch.empty((1, 3, 224, 224), device="meta")
        sample["label"] = torch.empty(1, dtype=torch.int64, device="meta")
    task = LanguageModel() if length else Classification()
    with torch.device("meta"):
        made = build()
    facts = facts_of(made, task, sample)
    return Inspected(build, task, sample, replace(facts, blocks=0) if "Res" in model else facts)


def of_run(run: Run) -> Inspected:
    """Return what is known of the model of a run."""
    lora = tuple(pair for pair in run.degrees if pair[0] in ("lora", "nf4"))
    return inspected(run.model, run.length, lora)


def predicted(run: Run, efficiencies: Efficiencies | None = None) -> StepTime:
    """Return the predicted time of a step.

    `half` of the products are computed again: half-way between what `selective` and `full` take.
    """
    if run.checkpointing == "half":
        one, two = (
            predicted(replace(run, checkpointing=mode), efficiencies)
            for mode in ("selective", "full")
        )
        mean = (one.step_s + two.step_s) / 2
        return replace(one, step_s=mean, mfu=one.mfu * one.step_s / mean)
    layout, known = Layout(run.config, run.gpus // run.per_node, ()), of_run(run)
    activations, used = known.measured(run.compute)["none"], efficiencies or Efficiencies()
    time = step_time(layout, known.facts, activations, run.machine, used)
    assert time is not None
    return time


def speed_of(run: Run, time: StepTime) -> float:
    """Return a prediction in the unit of `run.speed`."""
    if run.unit == "mfu":
        return 100 * time.mfu
    if run.unit == "tflops":
        return time.mfu * (run.machine.peak(run.compute) or 0) / 1e12
    samples = run.micro * run.accumulate * run.shares / time.step_s / run.gpus
    return samples * (run.length or 1)


def error_of(run: Run, efficiencies: Efficiencies | None = None) -> float:
    """Return predicted speed / published speed - 1."""
    assert run.speed
    return speed_of(run, predicted(run, efficiencies)) / run.speed - 1


def memory_of(run: Run) -> float:
    """Return the predicted GiB of a GPU, with as much of the allowance as the source counts.

    `half` of the products are kept: half-way between what `selective` and `full` need.
    """
    if run.checkpointing == "half":
        modes = ("selective", "full")
        return sum(memory_of(replace(run, checkpointing=mode)) for mode in modes) / 2
    known, source = of_run(run), SOURCES[run.source]
    with torch.device("meta"):
        model = known.build()
    memory = MemoryModel(model, known.facts, known.measured(run.compute, source.loss))
    config = run.config
    if config.train.lora.quantize:  # is refused with train.compile, which needs no other memory
        config = replace(config, train=replace(config.train, compile="off"))
    found = memory.of(Layout(config, run.gpus // run.per_node, ()), run.machine)
    left_out = found.allowance if source.memory == "allocated" else CONTEXT_BYTES
    return (found.total - left_out) / 2**30


def spread(errors: Iterable[float]) -> tuple[float, float, float]:
    """Return median, 90th percentile and largest of the sizes of errors.

    An error is how much larger the larger one is: twice as fast and half as fast are both 100 %.
    """
    sizes = sorted(max(1 + e, 1 / (1 + e)) - 1 for e in errors)
    return median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1]
