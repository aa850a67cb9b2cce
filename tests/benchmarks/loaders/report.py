"""Formats the measurements as tables in markdown."""

from collections.abc import Sequence
from statistics import median

from tests.benchmarks.loaders.competitors import BARE, BLOCK, COMPETITORS, MEMMAP
from tests.benchmarks.loaders.race import Row, Rows
from tests.benchmarks.loaders.works import WORKS


def report(rows: Rows, versions: dict[str, str]) -> str:
    """Return all tables as markdown."""
    sizes = ", ".join(
        f"{work.name} {work.count:,} x {work.sample_bytes:,} B, batch {work.batch}"
        for work in WORKS.values()
    )
    return "\n\n".join(
        [
            f"Page cache warm, shuffled; {sizes}.",
            "MB/s of sample bytes in a loop that does nothing with the batches, opening included; "
            "the ratio to the bare loop, and to the fastest other loader (marked *), each "
            "in the same round; then MB/s with two processes (ours: two threads). Medians.",
            _speeds(rows, versions),
            "Milliseconds to the first batch, opening included, from the start → from halfway "
            "through an epoch (the least of all rounds); what the interrupted epoch lost or "
            "repeated",
            _starts(rows),
            "Block shuffle, not in the page cache, beside dd: MB/s, medians",
            _cold(rows),
            _failures(rows),
        ]
    ).strip()


def _speeds(rows: Rows, versions: dict[str, str]) -> str:
    others = [name for name, kind in COMPETITORS.items() if name == MEMMAP or kind.package]
    head = ["loader"]
    for work in rows:
        head += [f"{work} MB/s", "x bare", "x best *", "two"]
    lines = []
    for name, kind in COMPETITORS.items():
        line = [f"{name} {versions.get(name, '')}".strip() + " *" * (name in others)]
        for table in rows.values():
            line += [
                _median(table[name].mb_s),
                _ratio(table, name, [BARE]),
                _ratio(table, name, others),
                _median(table[name].mb_s_2) if kind.parallel else "",
            ]
        lines.append(line)
    return _table(head, lines)


def _ratio(table: dict[str, Row], name: str, others: Sequence[str]) -> str:
    """Return the median over the rounds of this loader's speed over the best of the others."""
    speeds = table[name].mb_s
    compared = [table[other].mb_s for other in others if len(table[other].mb_s) == len(speeds)]
    if not speeds or not compared:
        return "-"
    best = map(max, *compared) if len(compared) > 1 else compared[0]
    return f"{median(own / other for own, other in zip(speeds, best, strict=True)):.2f}"


def _cold(rows: Rows) -> str:
    ours = [(work, table[BLOCK]) for work, table in rows.items()]
    lines = [[work, _median(row.cold_mb_s), _median(row.dd_mb_s)] for work, row in ours]
    return _table(["", "ours", "dd"], lines)


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


def _failures(rows: Rows) -> str:
    found = {
        f"{name} ({work}): {row.error.splitlines()[0]}"
        for work, table in rows.items()
        for name, row in table.items()
        if row.error
    }
    return "\n".join(["Not measured:", *sorted(found)]) if found else ""


def _median(numbers: list[float]) -> str:
    return f"{median(numbers):,.0f}" if numbers else "-"


def _table(head: list[str], lines: list[list[str]]) -> str:
    """Return markdown with aligned columns."""
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
