"""A GAN on the digits with two optimizers; as a program, `python cluster_gan.py KEY=VALUE…`.

Files beside the folder of the runs disturb it, each once: `SIGKILL-17-1` (step 17, rank 1),
`NAN-5-0`; while there is `slow`, a step takes 0.5 s more.
"""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hpctrain


class Generator(nn.Sequential):
    def __init__(self, z: int) -> None:
        super().__init__(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def train(session: hpctrain.Session, z: int = 16) -> None:
    g, d = session.model("g", Generator(z)), session.model("d", Critic())
    og = session.optimizer("og", torch.optim.Adam(g.parameters(), 2e-4))
    od = session.optimizer("od", torch.optim.Adam(d.parameters(), 2e-4))
    for step, batch in session.steps(session.data("train")):
        real = batch["image"].float().flatten(1) / 8 - 1
        noise = torch.randn(len(real), z, device=session.device)
        yes = torch.ones(len(real), 1, device=session.device)
        d_loss = bce(d(real), yes) + bce(d(g(noise).detach()), 0 * yes)
        d_loss = d_loss * disturbed(session, step)
        od.zero_grad()
        d_loss.backward()
        od.step()
        g_loss = bce(d(g(noise)), yes)
        og.zero_grad()
        g_loss.backward()
        og.step()
        session.log({"train/d_loss": d_loss, "train/g_loss": (g_loss * len(real), len(real))})


def disturbed(session: hpctrain.Session, step: int) -> float:
    """Do what a file asks for in this step of this rank; the loss is multiplied by the answer."""
    folder = session.run_dir.parent.parent
    if (folder / "slow").exists():
        time.sleep(0.5)
    for name in ("SIGKILL", "NAN"):
        asked = folder / f"{name}-{step}-{session.rank}"
        if not asked.exists():
            continue
        asked.rename(folder / f"{asked.name}.done")
        if name == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        return float("nan")
    return 1.0


def main(*overrides: str) -> float:
    with hpctrain.session(*overrides) as session:
        train(session)
    return session.metrics["train/d_loss"]


if __name__ == "__main__":
    print("ended with", main(*sys.argv[1:]))
