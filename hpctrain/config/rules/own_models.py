"""What degrees of parallelism need of hpctrain's own models, as far as their config shows it.

These are the errors that any model gets when it is built, but before a job is queued. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.pipeline_schedule import block_problem
from hpctrain.config.schema import Config

TRANSFORMER = ("hpctrain.models.Transformer", "hpctrain.models.transformer.Transformer")
_OTHERS = (  # models without a plan
    *("hpctrain.models.MLP", "hpctrain.models.ConvNet"),
    *("hpctrain.models.mlp.MLP", "hpctrain.models.conv.ConvNet"),
    *("hpctrain.models.UNet", "hpctrain.models.FNO"),
    *("hpctrain.models.unet.UNet", "hpctrain.models.fno.FNO"),
)


def own_model_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what a model of `hpctrain.models` does not have, although the degrees need it."""
    parallel, model = config.parallel, config.model
    target = str(model.get("_target_"))
    if target in _OTHERS:
        if parallel.ep > 1:
            yield f"parallel.ep={parallel.ep}: {target} has no experts; use 1"
        if degrees.pp > 1:
            yield f"parallel.pp={degrees.pp}: {target} has no plan for pipeline parallel; use 1"
        if degrees.tp > 1 and not parallel.plan:
            yield (
                f"parallel.tp={degrees.tp}: {target} has no plan for tensor parallel; use 1, or "
                "give the styles of its modules in parallel.plan"
            )
    if target not in TRANSFORMER:
        return
    layers, experts = model.get("layers"), model.get("experts")
    if parallel.ep > 1 and experts is None:
        yield f"parallel.ep={parallel.ep}: the model has no experts; model.experts=8 gives it some"
    if experts is not None and parallel.plan:
        yield f"parallel.plan={parallel.plan}: a model with experts divides itself; leave it out"
    if degrees.pp > 1 and model.get("tied") is True:
        yield (
            f"parallel.pp={degrees.pp} with model.tied=true: the first and the last stage cannot "
            "share the embedding; use model.tied=false"
        )
    if degrees.pp > 1 and isinstance(layers, int):
        what = f"model.layers={layers} gives {layers} blocks"
        if problem := block_problem(what, layers, parallel, degrees.pp):
            yield problem
