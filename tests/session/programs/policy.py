"""A tabular policy that learns from its own episodes: no model of torch, and no data."""

import random
from typing import Any

import numpy as np
from disturbance import steps

import hpctrain


class Table:
    """The values of a walk on five fields, of which the last one is the goal."""

    def __init__(self) -> None:
        self.q, self.visits = np.zeros((5, 2)), dict[tuple[int, int], int]()

    def state_dict(self) -> dict[str, Any]:
        return {"q": self.q, "visits": self.visits, "seen": {(0, "start")}, "mean": float("inf")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.q, self.visits = state["q"], state["visits"]
        assert (state["seen"], state["mean"]) == ({(0, "start")}, float("inf"))
        assert all(type(key) is tuple for key in self.visits)


def train(session: hpctrain.Session, each_rank: bool = True, own_seed: bool = True) -> None:
    table = session.keep("table", Table(), each_rank=each_rank)
    seed = session.rank if own_seed else 0
    rng = session.keep("rng", np.random.default_rng(seed), each_rank=each_rank)
    own = session.keep("own", random.Random(seed), each_rank=each_rank)
    for step, _ in steps(session):
        field, total = 2, 0.0
        for _ in range(20):
            greedy = int(table.q[field].argmax())
            action = int(rng.integers(2)) if rng.random() < 0.2 else greedy
            reached = max(0, min(4, field + (1 if action else -1)))
            # The global generator of Python, and one of the loop's own.
            reward = float(reached == 4) + 0.01 * random.random() + 0.01 * own.random()
            target = reward + 0.9 * table.q[reached].max()
            table.q[field, action] += 0.1 * (target - table.q[field, action])
            table.visits[field, action] = table.visits.get((field, action), 0) + 1
            field, total = reached, total + reward
        session.log({"train/reward": total})
        if step % 7 == 0:
            visits = sum(n * (f + 2) ** (a + 1) for (f, a), n in table.visits.items())
            session.log({"val/best": float(table.q.max()), "val/visits": visits})
