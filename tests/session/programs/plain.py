"""A plain script with a loop of its own: `python plain.py KEY=VALUE ...`, or with torchrun."""

import sys

import torch
from disturbance import steps

import hpctrain


def learn(*overrides: str) -> float:
    with hpctrain.session("name=plain", *overrides) as session:
        model = session.model("net", torch.nn.Linear(64, 10))
        optimizer = session.optimizer("sgd", torch.optim.SGD(model.parameters(), 0.1))
        for _, batch in steps(session, session.data("train")):
            logits = model(batch["image"].float().flatten(1) / 16)
            loss = torch.nn.functional.cross_entropy(logits, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log({"train/loss": loss})
        print("in the session", session.step)
    print("after the session", session.rank, session.world_size)
    return session.metrics["train/loss"]


if __name__ == "__main__":
    learn(*sys.argv[1:])
