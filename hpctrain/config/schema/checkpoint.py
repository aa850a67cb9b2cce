"""The keys of `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


@dataclass
class CheckpointConfig:
    """Checkpoints: a run resumes from the newest that is not damaged."""

    init_from: str | None = key(
        None,
        "The first attempt of the run starts from these weights: a run, one of its checkpoints, a "
        ".safetensors file, or a folder of Hugging Face. A run that has a checkpoint of its own "
        "resumes from that. Null starts from the initial values of the model.",
        identity=False,
    )
    init_digest: str | None = key(
        None,
        "The digest of the weights in init_from; it is part of the run's name, and no other "
        "weights are loaded. Null is filled in when the run is asked for.",
    )
    init_rename: list[dict[str, Any]] = key(
        [],
        "Names in init_from get the names of the model: the first {match: PATTERN, to: NAME} that "
        "fits. Each * stands for any text, and those of `to` for what those of `match` have found.",
    )
    init_skip: list[str] = key(
        [],
        "Weights whose names fit one of these patterns are not loaded, such as a head of another "
        "shape: those of the model keep their initial values. Stored weights that the model does "
        "not have must be named here. A * stands for any text.",
    )
    branch_digest: str | None = key(
        None,
        "The run goes on from the checkpoint of another run with this digest. `resume --branch` "
        "fills it in.",
    )
    every_steps: int | None = key(
        200,
        "A checkpoint is written every this many steps. Null means not by steps.",
        count="steps",
        identity=False,
    )
    every_s: float | None = key(
        None,
        "A checkpoint is written when this much time has passed since the last one, by the clock "
        "of rank 0. With every_steps both ask for checkpoints. Null does not look at the time.",
        unit="seconds",
        above=0,
        identity=False,
    )
    keep: int = key(
        2,
        "This many checkpoints are kept, older ones are removed. It is at least 2, because the "
        "newest may be damaged.",
        unit="checkpoints",
        at_least=2,
        identity=False,
    )
    best: str | None = key(
        None,
        "An evaluation in which this metric is better than ever before, such as val/loss, saves a "
        "checkpoint, which is kept and marked as the best. Null keeps no best checkpoint.",
        identity=False,
    )
