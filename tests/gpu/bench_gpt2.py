"""Measure tokens per second and MFU of hpctrain's step and of a loop written by hand.

    python tests/gpu/bench_gpt2.py                          GPT-2 124M, bf16, compiled
    python tests/gpu/bench_gpt2.py --model llama3_8b        one GPU of 140 GB: parameters in bf16,
                                                            activation checkpointing
    python tests/gpu/bench_gpt2.py --device cpu --tiny      a quick check that it runs

Both loops train the same model object with the optimizer that a run has, so they share its memory
and its compiled code. They take turns, and the table shows the median of the turns. The loop by
hand computes the cross-entropy of all logits at once, clips with torch's function and has no
metrics.

MFU = tokens/s x FLOPs per token / peak FLOPs per second of the GPU in dense bf16. The FLOPs per
token are 6 N + 12 layers x dim x length (PaLM, Chowdhery et al. 2022), from the model's
`flops_per_token`. What activation checkpointing computes a second time does not count.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.sections import LoopSections
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.build_optimizer import build_optimizer
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.insight.estimates.hardware import peak_of
from hpctrain.models import Transformer
from hpctrain.tasks import LanguageModel, Task
from tests.steps import step_of, stop_of

CONF = Path(__file__).parents[2] / "conf" / "model"
LR, CLIP = 1e-4, 1.0
TINY = {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "learned_positions": 64}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2_124m", "llama3_8b"), default="gpt2_124m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny GPT-2, not compiled")
    parser.add_argument("--rows", type=int, help="sequences in a batch (16; Llama 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (1024; Llama 4096)")
    parser.add_argument("--layers", type=int, help="of the model, if not all")
    parser.add_argument("--compile", choices=("off", "blocks", "model"))
    parser.add_argument("--turns", type=int, default=10, help="turns of each loop (10)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (5)")
    parser.add_argument("--json", action="store_true", help="print the figures as a last line, too")
    given = parser.parse_args()
    llama = given.model == "llama3_8b"
    if given.tiny and llama:
        parser.error("--tiny is a tiny GPT-2")
    if given.tiny:
        given.rows, given.length = given.rows or 4, given.length or 64
        given.turns, given.steps = min(given.turns, 3), min(given.steps, 2)
    given.rows = given.rows or (2 if llama else 16)
    given.length = given.length or (4096 if llama else 1024)
    given.compile = given.compile or ("off" if given.tiny else "blocks" if llama else "model")
    return given


def build(given: argparse.Namespace) -> tuple[ParallelModel, torch.optim.Optimizer]:
    device = torch.device(given.device, 0 if given.device == "cuda" else None)
    keys: dict[str, Any] = yaml.safe_load((CONF / f"{given.model}.yaml").read_text())
    del keys["_target_"]
    config = Config()
    config.precision.compute = "bf16"
    config.train.compile = given.compile
    config.optimizer.lr = LR
    if given.model == "llama3_8b":
        config.precision.params = "bf16"
        config.train.activation_checkpointing = "full"
    keys |= (TINY if given.tiny else {}) | ({"layers": given.layers} if given.layers else {})
    made = functools.partial(Transformer, **keys)
    return built(made, config, device)


def built(
    made: Callable[[], nn.Module], config: Config, device: torch.device
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Return a model on one device, and the optimizer that a run has."""
    mesh, precision = Mesh(Degrees(), 0, device), Precision(config.precision, device)
    training = training_of(LoopSections.of(config), mesh)
    model = parallelize(made, config.parallel, mesh, precision, training)
    return model, build_optimizer(config.optimizer, model)


def ours(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Batch, task: Task | None = None
) -> Callable[[], Any]:
    """Return a step, and what a run does after it: it reads the numbers of the step before."""
    step = step_of(model, task or LanguageModel(), optimizer, clip_norm=CLIP)
    stop = stop_of(step)

    def step_and_judge() -> None:
        step(batch, LR)
        step.health.judge(late=True)
        assert not stop.agreed

    return step_and_judge


def by_hand(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Batch
) -> Callable[[], Any]:
    module, tokens = model.module, batch["tokens"]

    def step() -> None:
        with model.precision.forward():
            logits = module(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], Any], steps: int, device: str) -> float:
    """Run `steps` steps and return the mean seconds of a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def peak_flops(device: str) -> float | None:
    """Return the dense peak of this GPU in bf16, FLOP/s; None where no file of hardware has it."""
    if device == "cpu":
        return None
    found = torch.cuda.get_device_properties(0)
    return peak_of({}, "bf16", found.name, found.total_memory)


def main() -> None:
    given = arguments()
    model, optimizer = build(given)
    draw = torch.Generator().manual_seed(0)
    module = model.module
    assert isinstance(module, Transformer)
    shape = (given.rows, given.length + 1)
    batch = {
        "tokens": torch.randint(0, module.vocab_size, shape, generator=draw).to(given.device),
        "mask": torch.ones(given.rows, dtype=torch.bool, device=given.device),
    }
    loops = {f.__name__: f(model, optimizer, batch) for f in (by_hand, ours)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    memory = dict.fromkeys(loops, 0)
    for name, step in loops.items():  # the first steps compile and make the optimizer's state
        seconds(step, 3, given.device)
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            seconds(step, 1, given.device)
            memory[name] = torch.cuda.max_memory_allocated()
    for _ in range(given.turns):
        for name, step in loops.items():
            times[name].append(seconds(step, given.steps, given.device))

    tokens, flops = given.rows * given.length, module.flops_per_token(given.length)
    place = torch.cuda.get_device_name(0) if given.device == "cuda" else "CPU"
    count = sum(p.numel() for p in model.parameters)
    print(
        f"{'tiny ' * given.tiny}{given.model}, {count:,} parameters, batch {given.rows} x "
        f"{given.length} tokens, {flops / 1e9:.3f} GFLOP per token, compile {given.compile}, "
        f"{place}, torch {torch.__version__}"
    )
    print("| loop | ms per step | tokens/s | MFU | peak memory |")
    print("|---|---|---|---|---|")
    peak = peak_flops(given.device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        rate = tokens / median
        mfu = f"{100 * rate * flops / peak:.1f} %" if peak else "-"
        held = f"{memory[name] / 2**30:.2f} GiB" if memory[name] else "-"
        label = {"by_hand": "by hand", "ours": "hpctrain"}[name]
        print(f"| {label} | {1000 * median:.2f} | {rate:,.0f} | {mfu} | {held} |")
    ratio = medians["ours"] / medians["by_hand"]
    print(f"hpctrain takes {ratio:.3f} of the time by hand")
    if given.json:
        figures: dict[str, float] = {"time_of_hand": ratio}
        for name, median in medians.items():
            figures |= {f"{name}_ms": 1000 * median, f"{name}_tokens_per_s": tokens / median}
            figures |= {f"{name}_peak_bytes": memory[name]}
            figures |= {f"{name}_mfu": tokens / median * flops / peak} if peak else {}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
