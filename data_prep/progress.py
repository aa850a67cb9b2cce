"""How far, how fast, how long still: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping, Sized
from typing import TypeVar

EVERY_S = 10.0

Item = tuple[str, Mapping[str, Sized]]
AnyItem = TypeVar("AnyItem", bound=Item)


def track(batches: Iterator[AnyItem], total: int | None) -> Iterator[AnyItem]:
    """Pass (split, samples) on, showing progress on stderr."""
    return (_bar if sys.stderr.isatty() else _lines)(batches, total)


def _bar(batches: Iterator[AnyItem], total: int | None) -> Iterator[AnyItem]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, rate="")
        for item in batches:
            yield item
            progress.advance(task, _count(item))
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:,.0f} samples/s" if speed else "")


def _lines(batches: Iterator[AnyItem], total: int | None) -> Iterator[AnyItem]:
    start = said = time.monotonic()
    done = 0
    for item in batches:
        yield item
        done += _count(item)
        now = time.monotonic()
        if now - said >= EVERY_S:
            said, rate = now, done / (now - start)
            left = f" of {total}, {(total - done) / rate:.0f} s left" if total else ""
            print(f"{done} samples{left}, {rate:,.0f} samples/s", file=sys.stderr, flush=True)


def _count(item: Item) -> int:
    return len(next(iter(item[1].values())))
