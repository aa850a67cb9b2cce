"""Which runs of a sweep are queued: those that are foreseen to end within its budget."""

from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.output import runs, say
from hpctrain.runs.budget import WORDS, Budget


def divide(
    entries: Sequence[Entry], todo: list[Entry], folder: Path
) -> tuple[list[Entry], list[Entry]]:
    """Return those of the runs `todo` that fit in the budget, in their order, and the others.

    The budget is that of all `entries`, and is written into the folder of the sweep. If none fits
    and none is under way, it is a LaunchError: the same command would never find room.
    """
    budget = Budget.planned({entry.run.path: entry.config for entry in entries})
    if budget is None:
        return todo, []
    standing = budget.standing(folder)
    left = standing.left
    found = {by: sum(budget.shares[str(e.run.path)].foreseen == by for e in todo) for by in WORDS}
    fitting, others = list[Entry](), list[Entry]()
    for entry in todo:
        share = budget.shares[str(entry.run.path)]
        hours = share.hours if entry.again else budget.needs(entry.run.path)
        if hours <= left:
            left -= hours
            fitting.append(entry)
        else:
            entry.mark(Status.OVER_BUDGET, f"{hours:.4g} {budget.unit}")
            others.append(entry)
    said = [f"{count} of {runs(len(todo))} {WORDS[by]}" for by, count in found.items() if count]
    text = "; ".join([str(standing), *said])
    if others and not fitting and not standing.under_way:
        raise LaunchError(
            f"launch.budget_gpu_hours={budget.hours:g}: nothing was queued, as no run that is left "
            f"is foreseen to end within it ({others[0].run.name} {others[0].state}). {text}"
        )
    say(text)
    budget.write(folder)
    return fitting, others
