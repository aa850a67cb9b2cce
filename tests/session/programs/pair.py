"""Two models with an optimizer each, without random numbers: for the comparison of layouts."""

import torch
from disturbance import steps
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import hpctrain


def train(session: hpctrain.Session) -> None:
    torch.manual_seed(session.rank)  # all ranks get the values of rank 0
    coder = session.model("coder", nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 64)))
    judge = session.model("judge", nn.Linear(64, 10))
    first = session.optimizer("first", torch.optim.AdamW(coder.parameters(), 1e-2))
    second = session.optimizer("second", torch.optim.SGD(judge.parameters(), 0.1, momentum=0.9))
    schedule = session.keep("schedule", torch.optim.lr_scheduler.StepLR(second, 4, 0.5))
    for step, batch in steps(session, session.data("train")):
        image = batch["image"].to(torch.get_default_dtype()).flatten(1) / 16
        made = coder(image)
        loss = mse_loss(made, image) + 0.1 * cross_entropy(judge(made), batch["label"])
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        first.step()
        second.step()
        schedule.step()
        session.log({"train/loss": loss, "train/rows": (loss.detach() * len(image), len(image))})
        if step % 4 == 2:
            for name in ("val", "first"):  # the split, and one of data.val_sets
                right = seen = torch.zeros((), dtype=torch.float64)
                with torch.no_grad():
                    for part in session.data(name):
                        pixels = part["image"].to(torch.get_default_dtype()).flatten(1) / 16
                        same = judge(coder(pixels)).argmax(1) == part["label"]
                        right = right + (same & part["mask"]).sum()
                        seen = seen + part["mask"].sum()
                rows = seen, 1 / session.world_size  # their sum
                session.log({f"val/{name}": (right, seen), f"val/{name}_rows": rows})
