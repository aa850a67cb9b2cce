"""Which patterns of a config match nothing in its model: a process of its own, before a submission.

standard input     a JSON list of questions; each has the model and what is matched against it
standard output    a JSON list of answers: what is wrong ("" if nothing), and why it is not known

The model is built on torch's meta device, so it needs no memory. What the constructor prints goes
to standard error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.checkpoint.files.matching import renames
from hpctrain.checkpoint.files.weight_files import find_weights
from hpctrain.checkpoint.starting_point import compare
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.config.schema import LoRAConfig, OptimizerConfig
from hpctrain.errors import HpctrainError
from hpctrain.job.building.instantiate import instantiate
from hpctrain.parallel.preparing.parameter_settings import settings, with_adapters


def answer(question: dict[str, Any]) -> dict[str, str]:
    """Return `problem`, what is wrong, and `unknown`, why nobody can tell.

    Args:
        question: `model`, a section with a `_target_`; `optimizer` and `lora`, keys of these
            sections; `blocks`, the names of classes of blocks; and `start`, the keys of
            `checkpoint.init_*` without `init_`, where `from` may be None.
    """
    lora = LoRAConfig(**question["lora"])
    try:
        with torch.device("meta"):
            model: nn.Module = instantiate("model", question["model"])
            names = [*model.named_parameters()]
    except Exception as error:  # the constructor of a user may raise anything
        return {"problem": "", "unknown": next(iter(str(error).splitlines()), repr(error))}
    if not names:
        return {"problem": "", "unknown": "it has no parameters before it is trained"}
    try:
        with torch.device("meta"):
            with_adapters(model, lora)
        settings(model, OptimizerConfig(**question["optimizer"]), question["blocks"])
    except HpctrainError as error:
        return {"problem": str(error), "unknown": ""}
    start = question["start"]
    try:
        if start["from"] is not None:
            weights = open_weights(find_weights(Path(start["from"])))
            compare(model, weights, renames(start["rename"]), start["skip"]).refuse_unused()
    except HpctrainError as error:
        return {"problem": f"checkpoint.init_from={start['from']}: {error}", "unknown": ""}
    return {"problem": "", "unknown": ""}


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with output:
        json.dump([answer(question) for question in json.load(sys.stdin)], output)
