"""Data that is not ours, and a model of Hugging Face in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
from disturbance import steps

import hpctrain


class Stateful:
    """Batches with a state, as torchdata's StatefulDataLoader has: nothing is read again."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 7:
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.arange(6) + self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def generated() -> Iterator[torch.Tensor]:
    """Yield batches that have no position: what was used is read again."""
    for _ in range(7):
        yield torch.randint(12, (6,))


def loader() -> torch.utils.data.DataLoader[torch.Tensor]:
    rows = [torch.arange(6) + n for n in range(14)]
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]


def network(kind: str) -> torch.nn.Module:
    if kind == "plain":
        return torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def train(session: hpctrain.Session, source: str = "list", kind: str = "plain") -> None:
    data = {
        "stateful": Stateful,
        "generator": lambda: generated,
        "loader": loader,
        "list": lambda: [torch.arange(6) + n for n in range(7)],
    }[source]()
    net = session.model("net", network(kind))
    sgd = session.optimizer("sgd", torch.optim.AdamW(net.parameters(), 1e-3))
    for _, batch in steps(session, data):
        tokens = batch.reshape(-1, 6)
        outputs = net(tokens)
        logits = outputs if kind == "plain" else outputs.logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        session.log({"train/loss": loss, "train/first": float(tokens[0, 0])})
    if source == "stateful":
        print("batches read here:", data.read)
