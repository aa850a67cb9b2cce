"""A training step on a small model, for the tests of its parts."""

import torch

from hpctrain.distributed.ranks import RankInfo
from hpctrain.faults.stop import Stop
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from hpctrain.train.step import Precision, TrainStep

ALONE = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})


def batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 16, (size, 1, 8, 8), generator=generator, dtype=torch.uint8),
        "label": torch.randint(0, 10, (size,), generator=generator),
        "mask": torch.ones(size, dtype=torch.bool),
    }


def make(accumulate: int = 1, clip_norm: float | None = None, dropout: float = 0.0) -> TrainStep:
    torch.manual_seed(0)
    model = MLP(64, [16], 10, dropout)
    return TrainStep(
        model,
        Classification(),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        Precision("fp32", torch.device("cpu")),
        accumulate=accumulate,
        clip_norm=clip_norm,
        stop=Stop(),
    )


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in step.model.parameters()])
