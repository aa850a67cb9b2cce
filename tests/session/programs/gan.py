"""A GAN on the digits: two models, two optimizers, one loop."""

import torch
from disturbance import steps
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hpctrain


class Generator(nn.Sequential):
    def __init__(self, z: int) -> None:
        super().__init__(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


class Critic(nn.Sequential):
    def __init__(self) -> None:
        layers = nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1)
        super().__init__(*layers)


def train(session: hpctrain.Session, z: int = 16) -> None:
    g, d = session.model("g", Generator(z)), session.model("d", Critic())
    og = session.optimizer("og", torch.optim.Adam(g.parameters(), 2e-4))
    od = session.optimizer("od", torch.optim.Adam(d.parameters(), 2e-4))
    for step, batch in steps(session, session.data("train")):
        real = batch["image"].float().flatten(1) / 8 - 1
        noise = torch.randn(len(real), z, device=session.device)
        yes = torch.ones(len(real), 1, device=session.device)
        d_loss = bce(d(real), yes) + bce(d(g(noise).detach()), 0 * yes)
        od.zero_grad()
        d_loss.backward()
        od.step()
        g_loss = bce(d(g(noise)), yes)
        og.zero_grad()
        g_loss.backward()
        og.step()
        session.log({"train/d_loss": d_loss, "train/g_loss": (g_loss * len(real), len(real))})
        if step % 7 == 3:
            fakes = sum(float((d(g(noise)) > 0).sum()) for _ in session.data("val"))
            session.log({"val/fooled": fakes / 382})
    if session.is_main:
        print("the loop is over", session.step)
