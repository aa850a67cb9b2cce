"""The tables, and what issue 4 asked for beside what was measured."""

from collections.abc import Callable
from statistics import median

from tests.benchmarks.loaders.competitors import AHEAD, ALONE, BLOCK, COMPETITORS, LIMITS, OURS
from tests.benchmarks.loaders.race import SLOW_DISK, Row, Rows
from tests.benchmarks.loaders.works import WORKS

OVER_PEERS = {"images": 4, "tokens": 4, "fields": 2}


def report(rows: Rows, versions: dict[str, str]) -> str:
    """All tables as markdown."""
    sizes = ", ".join(
        f"{work.name} {work.count:,} x {work.sample_bytes:,} B, batch {work.batch}"
        for work in WORKS.values()
    )
    return "\n\n".join(
        [
            f"Page cache warm, shuffled; {sizes}.",
            "MB/s of sample bytes, one process (ours: a thread, and the consumer reads, too; then "
            "two processes, two threads), the best of the rounds; of the limit = the faster bare "
            "loop; over the best peer (those marked *, made to give tensors their own way)",
            _speeds(rows, versions),
            "Milliseconds to the first batch, opening included, from the start → from halfway "
            "through an epoch; what the interrupted epoch lost or repeated",
            _starts(rows),
            "Asked and measured",
            _thresholds(rows),
            _failures(rows),
        ]
    ).strip()


def _speeds(rows: Rows, versions: dict[str, str]) -> str:
    head = ["loader"]
    for work in rows:
        head += [f"{work} MB/s", "of limit", "x best peer", "two"]
    lines = []
    for name, kind in COMPETITORS.items():
        line = [f"{name} {versions.get(name, '')}".strip() + " *" * (name in _own_way())]
        for table in rows.values():
            speed = max(table[name].mb_s, default=0.0)
            peer = _best(table, _own_way())
            line += [
                _number(speed),
                f"{speed / _best(table, LIMITS):.2f}" if speed else "-",
                f"{speed / peer:.1f}" if speed and peer else "-",
                _number(max(table[name].mb_s_2, default=0.0)) if kind.parallel else "",
            ]
        lines.append(line)
    return _table(head, lines)


def _starts(rows: Rows) -> str:
    lines = []
    for name, kind in COMPETITORS.items():
        line = [name, kind.shuffle]
        for table in rows.values():
            row = table[name]
            if row.first_ms:
                resume = f" → {min(row.resume_ms):.1f}" if row.resume_ms else ""
                line += [f"{min(row.first_ms):.1f}{resume}", _exact(row)]
            else:
                line += ["-", "-"]
        lines.append(line)
    head = ["loader", "shuffle"]
    for work in rows:
        head += [f"{work} ms", "exact"]
    return _table(head, lines)


def _exact(row: Row) -> str:
    if not row.check:
        return "-"
    if row.check["missed"] or row.check["repeated"]:
        return f"**missed {row.check['missed']}, repeated {row.check['repeated']}**"
    return "yes" if row.check["same_order"] else "another order"


def _thresholds(rows: Rows) -> str:
    lines: list[list[str]] = []

    def add(what: str, measure: Callable[[dict[str, Row], str], tuple[float, bool] | None]) -> None:
        line = [what]
        for work, table in rows.items():
            try:
                measured = measure(table, work)
            except (ValueError, ZeroDivisionError):  # somebody failed: see below
                measured = None
            line.append(
                f"{measured[0]:.2f} {'met' if measured[1] else '**not met**'}"
                if measured
                else "not measured"
            )
        lines.append(line)

    def at_least(value: float, wanted: float) -> tuple[float, bool]:
        return value, value >= wanted

    def at_most(value: float, wanted: float) -> tuple[float, bool]:
        return value, value <= wanted

    add(
        ">= 0.9 of the limit, one thread",
        lambda table, _: at_least(max(table[OURS].mb_s) / _best(table, LIMITS), 0.9),
    )
    add(
        ">= 0.9 of the loop with four batches live",
        lambda table, _: at_least(max(table[OURS].mb_s) / _best(table, [AHEAD]), 0.9),
    )
    add(
        "more with two that read: the thread and the consumer over the consumer alone",
        lambda table, _: at_least(max(table[OURS].mb_s) / max(table[ALONE].mb_s), 1.0),
    )
    add(
        ">= 4, 4, 2 x the best peer",
        lambda table, work: at_least(
            max(table[OURS].mb_s) / _best(table, _own_way()), OVER_PEERS[work]
        ),
    )
    add(
        "the same, peers taken apart by hand too",
        lambda table, work: at_least(
            max(table[OURS].mb_s) / _best(table, [n for n, k in COMPETITORS.items() if k.peer]),
            OVER_PEERS[work],
        ),
    )
    add("first batch <= 50 ms", lambda table, _: at_most(min(table[OURS].first_ms), 50))
    add(
        "resume no dearer than a start: over it (<= 1.1)",
        lambda table, _: at_most(min(table[OURS].resume_ms) / min(table[OURS].first_ms), 1.1),
    )
    add(
        "cold, block shuffle: >= 0.9 of dd",
        lambda table, _: at_least(max(table[BLOCK].cold_mb_s) / max(table[BLOCK].dd_mb_s), 0.9),
    )
    add(
        f"the same on a disk of {SLOW_DISK / 1e6:.0f} MB/s, medians",
        lambda table, _: at_least(
            median(table[BLOCK].limited_cold_mb_s) / median(table[BLOCK].limited_dd_mb_s), 0.9
        ),
    )
    return _table(["asked", *rows], lines)


def _failures(rows: Rows) -> str:
    found = {
        f"{name} ({work}): {row.error.splitlines()[0]}"
        for work, table in rows.items()
        for name, row in table.items()
        if row.error
    }
    return "\n".join(["Not measured:", *sorted(found)]) if found else ""


def _own_way() -> list[str]:
    return [name for name, kind in COMPETITORS.items() if kind.peer and not kind.by_hand]


def _best(table: dict[str, Row], names: list[str] | tuple[str, ...]) -> float:
    return max((speed for name in names for speed in table[name].mb_s), default=0.0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value else "-"


def _table(head: list[str], lines: list[list[str]]) -> str:
    """Markdown whose columns are aligned, for those who read it as it is."""
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
