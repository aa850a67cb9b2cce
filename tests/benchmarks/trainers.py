"""The same training by several trainers, each in a process of its own that takes turns.

python -m tests.benchmarks.trainers NAME DATA, from the root of the checkout

A turn is SLICE steps. After each turn the process prints its microseconds per step, in wall time
and in CPU time, then waits for a line on stdin. The model is so small that the trainer's own work
shows: a perceptron, 64 samples of handwritten digits in each step, AdamW, clipping by the global
norm, one thread. All trainers compute the sum of the losses and the number of hits. All but
"hpctrain", which reads them with its loader, get their batches from memory.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]

SLICE, TURNS, WARM = 100, 42, 2  # the first turns warm up
LOG_EVERY = 20  # the default of hpctrain
LR = 1e-3


class Turns:
    """Counts steps; after each slice it prints the time and waits until it is its turn again."""

    def __init__(self) -> None:
        # Others print to stdout, too.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._steps, self._began = 0, self._now()

    def step(self) -> None:
        self._steps += 1
        if self._steps % SLICE == 0:
            spent = [(b - a) / SLICE * 1e6 for a, b in zip(self._began, self._now(), strict=True)]
            self._out.write("{} {}\n".format(*spent))
            sys.stdin.readline()
            self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def mlp() -> nn.Module:
    from hpctrain.models import MLP

    return MLP(64, [256, 256], 10)


def batches(data: Path) -> list[Batch]:
    """An epoch of batches, as hpctrain's loader makes them."""
    from hpctrain.data.loading.loader import Loader
    from hpctrain.data.sources.reader import Reader

    loader = Loader(Reader(data, "train"), global_batch_size=64, max_epochs=1)
    return [{name: value.clone() for name, value in batch.items()} for batch in loader]


def torch_loader(data: Path) -> Any:
    """The same batches as the peers want them."""
    return torch.utils.data.DataLoader(batches(data), batch_size=None)  # type: ignore[arg-type]


def losses(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses, the number of hits, and the number of samples."""
    mask, target = batch["mask"], batch["label"].long()
    logits = model(batch["image"].float() * (1 / 16))
    each = F.cross_entropy(logits, target, reduction="none")
    hits = logits.argmax(-1) == target
    return (each * mask).sum(), (hits & mask).sum(), mask.sum()


def bare(data: Path, turns: Turns) -> None:
    """A loop by hand, which logs and stops nothing."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for batch in itertools.cycle(batches(data)):
        loss, _, count = losses(model, batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.step()


def ours(data: Path, turns: Turns) -> None:
    """`python -m hpctrain`: loader, log lines, tracking, heartbeat, schedule and stop requests."""
    from hpctrain import cli
    from hpctrain.engine.building import build_steps
    from hpctrain.engine.parts.display import Lines

    class Shown(Lines):
        def advance(self, step: int) -> None:
            turns.step()

    build_steps.choose_display = Shown  # type: ignore[attr-defined]
    steps = SLICE * (TURNS + 1)  # the last turn is never finished
    with tempfile.TemporaryDirectory() as folder:
        where = [f"data.path={data}", f"output_dir={folder}", "parallel.device=cpu"]
        keys = [f"train.max_steps={steps}", "train.max_epochs=null", f"train.eval_every={steps}"]
        keys += [f"optimizer.lr={LR}", "scheduler=constant", "scheduler.warmup_steps=0"]
        keys += [f"checkpoint.every_steps={steps}", "tracking.upload=false"]
        sys.argv[1:] = ["experiment=digits", *where, *keys]
        cli.main()


def ours_from_memory(data: Path, turns: Turns) -> None:
    """The same, with the batches of the others instead of the loader."""
    from hpctrain.data.device_prefetcher import DevicePrefetcher

    cached, read = batches(data), DevicePrefetcher.__iter__

    def given(feed: DevicePrefetcher) -> Iterator[Batch]:
        yield next(read(feed))  # so that the feed knows the step of the last batch
        yield from itertools.cycle(cached)

    DevicePrefetcher.__iter__ = given  # type: ignore[method-assign]
    ours(data, turns)


def lightning(data: Path, turns: Turns) -> None:
    """Lightning with its CSV logger."""
    import warnings

    import lightning as pl
    from lightning.pytorch.loggers import CSVLogger

    warnings.simplefilter("ignore")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            loss, hits, count = losses(self.model, batch)
            loss = loss / count
            self.log_dict({"loss": loss.detach(), "accuracy": hits / count}, batch_size=64)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
            turns.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            gradient_clip_val=1.0,
            logger=CSVLogger(folder, flush_logs_every_n_steps=10**9),
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch_loader(data))


def accelerate(data: Path, turns: Turns) -> None:
    """A loop by hand over what Accelerate has prepared, which writes a line of JSON as a log."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch_loader(data))
    step = 0
    with tempfile.TemporaryFile("w") as log:
        while True:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss, hits, count = losses(model, batch)
                    accelerator.backward(loss / count)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % LOG_EVERY == 0:
                    means = {"loss": (loss / count).item(), "accuracy": (hits / count).item()}
                    log.write(json.dumps({"step": step} | means) + "\n")
                turns.step()


TRAINERS: dict[str, Callable[[Path, Turns], None]] = {
    "bare loop": bare,
    "hpctrain": ours,
    "its trainer": ours_from_memory,
    "lightning": lightning,
    "accelerate": accelerate,
}


def main(name: str, data: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # gradients become so small here that a step would take longer
    torch.manual_seed(0)
    TRAINERS[name](Path(data), Turns())


if __name__ == "__main__":
    main(*sys.argv[1:])
