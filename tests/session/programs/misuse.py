"""What a loop of one's own can do wrong, one function each; as a program it prints what each says.

`python -m misuse FOLDER DIGITS NAME...`: one line of JSON for each of these functions.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

import torch

import hpctrain
from hpctrain.errors import HpctrainError


def said(session: hpctrain.Session, call: str, *values: object) -> None:
    """Print what an expression about the session is refused with."""
    try:
        eval(call, {"session": session, "torch": torch, "values": values})
        print(f"{call}: NOT REFUSED", file=sys.stderr)
    except HpctrainError as error:
        if session.is_main:
            print(json.dumps([call, f"{type(error).__name__}: {error}"]), file=sys.__stdout__)


def names(session: hpctrain.Session) -> None:
    net, empty = session.model("net", torch.nn.Linear(2, 1)), torch.nn.Linear(2, 3)
    session.optimizer("sgd", torch.optim.SGD(net.parameters(), 0.1))
    for call in (
        "session.model('net', torch.nn.Linear(2, 1))",
        "session.keep('net', torch.Generator())",
        "session.model('1net', torch.nn.Linear(2, 1))",
        "session.keep('a name', torch.Generator())",
        "session.keep('odd', 7)",
        "session.optimizer('other', torch.optim.SGD(values[0].parameters(), 0.1))",
        "session.log({'train/loss': 1.0})",
        "session.end('early')",
        "session.steps(max_steps=0)",
        "session.data('nothing')",
    ):
        said(session, call, empty)
    for step, _ in session.steps(max_steps=2):
        if step:
            continue
        for call in (
            "session.model('late', torch.nn.Linear(2, 1))",
            "session.optimizer('late', torch.optim.SGD(values[0].parameters(), 0.1))",
            "session.keep('late', torch.Generator())",
            "session.steps()",
            "session.log({'loss': 1.0})",
            "session.log({'perf/loss': 1.0})",
            "session.log({'train/epoch': 1.0})",
            "session.log({'train/loss': torch.ones(2)})",
            "session.log({'train/loss': 'low'})",
        ):
            said(session, call, empty)
    said(session, "session.log({'train/late': 1.0})")
    said(session, "session.end('late')")


def leaves(session: hpctrain.Session) -> None:
    for step, _ in session.steps():
        if step == 3:
            break


def returns_at_once(session: hpctrain.Session) -> None:
    pass


def a_split(session: hpctrain.Session) -> None:
    for _ in session.steps(session.data("val")):
        pass


def empty(session: hpctrain.Session) -> None:
    for _ in session.steps([]):
        pass


def no_number(session: hpctrain.Session) -> None:
    for _ in session.steps(7):
        pass


def spent(session: hpctrain.Session) -> None:
    for _ in session.steps(iter([1, 2])):
        pass


def unknown_state(session: hpctrain.Session) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"inner": [object()]}

        def load_state_dict(self, state: object) -> None: ...

    session.keep("odd", Odd())
    for _ in session.steps():
        pass


def log_other_names(session: hpctrain.Session) -> None:
    for _ in session.steps():
        session.log({f"train/of_{session.rank}": 1.0})


def log_on_main(session: hpctrain.Session) -> None:
    for step, _ in session.steps():
        if step == 2 and session.is_main:
            session.log({"val/loss": 1.0})


def differ(session: hpctrain.Session) -> None:
    session.keep("own", torch.Generator().manual_seed(session.rank))
    for _ in session.steps():
        pass


def ends(session: hpctrain.Session) -> None:
    for step, _ in session.steps():
        session.log({"train/loss": 1.0})
        if step == 4 and session.rank == session.world_size - 1:
            session.end("good enough")


def nan_once(session: hpctrain.Session) -> None:
    """Count what the batches of five steps sum up to; one batch is bad."""
    total = session.keep("total", torch.nn.Linear(1, 1).requires_grad_(False))
    total.weight.zero_()
    for _, number in session.steps([1, 2, 4, 8, float("nan"), 16, 32, 64, 128, 256, 512]):
        total.weight.add_(number)
        session.log({"train/sum": float(total.weight)})


def nan(session: hpctrain.Session) -> None:
    numbers: Iterator[tuple[int, int]] = session.steps([*range(4)])
    for step, number in numbers:
        bad = step == 6 and session.rank == session.world_size - 1
        session.log({"train/loss": 1.0, "train/norm": float("nan") if bad else float(number)})


def main(folder: str, digits: str, *functions: str) -> None:
    for name in functions:
        name, *more = name.split(",")
        given = (f"loop._target_=misuse.{name}", f"name={name}", f"output_dir={folder}")
        usual = ("train.max_steps=9", "checkpoint.every_steps=2", "train.log_every=2")
        quiet = ("monitor.enabled=false", "tracking.upload=false", f"data.path={digits}")
        answer = "no error"
        with redirect_stdout(sys.stderr), suppress(SystemExit):
            try:
                hpctrain.train(*given, *usual, *quiet, *more)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
        print(json.dumps([",".join([name, *more]), answer]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
