"""Makes docs/published.md, tests/plan/published.md, and the numbers of the product.

These are in errors.yaml beside `hpctrain.insight.plan.predicting.accuracy`.

python -m tests.plan.published_page
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpctrain.insight.estimates.hardware import known
from hpctrain.insight.plan.predicting import accuracy
from hpctrain.insight.plan.predicting.accuracy import class_of
from tests.conftest import ROOT
from tests.plan.published import SOURCES, Run, error_of, memory_of, of_run, runs, spread

PAGE = ROOT / "docs" / "published.md"
ROWS = ROOT / "tests" / "plan" / "published.md"  # each run beside its prediction, and the sources
# Lists that do not count: those of `Run.apart`, and what `plan` never answers for.
LISTS = {
    "old": "without flash attention",
    "padded": "experts padded to the busiest one",
    "unverified": "descriptions that could not be verified",
    "refused": "layouts that hpctrain refuses",
}
MEMORY, APART = "memory", "memory of runs that do not count"
_NO_SPEED = (MEMORY, APART)
_UNITS = {"tok": "tokens/s", "img": "images/s", "mfu": "% MFU", "tflops": "TFLOP/s"}
_NAMES = {
    "a100_40": "A100 40 GB",
    "a100_80": "A100 80 GB",
    "h100_sxm": "H100 SXM",
    "h100_pcie": "H100 PCIe",
    "h100_500w": "H100 of 500 W",
    "h200": "H200",
    "b200": "B200",
    "rtx_4090": "RTX 4090",
    "rtx_a6000": "RTX A6000",
    "rtx_3090": "RTX 3090",
    "v100": "V100",
}
_ROW = re.compile(r"^\| (judges|sets) \| .* \| ([+-]\d+) % \|$")


def named_class(run: Run) -> str:
    if run.apart or run.refused:
        return LISTS[run.apart or "refused"]
    return class_of(of_run(run).facts, run.config)


def named_memory(run: Run) -> str:
    return APART if run.apart or run.refused else MEMORY


def row(run: Run, published: float, value: float) -> str:
    """Return the row of a run: what it is, its published value, the predicted one, the error."""
    shape = "images" if not run.length else f"{run.length:,} tokens"
    parts = [f"{run.source}: {run.model}", f"{run.gpus:,} {_NAMES[run.hardware]}", run.compute]
    parts += [f"{shape} x {run.micro:,} x {run.accumulate}"]
    parts += [" ".join(f"{n} {v}".strip() for n, v in run.degrees if n != "schedule")]
    parts += [] if run.checkpointing == "none" else [f"{run.checkpointing} checkpointing"]
    parts += ["fused"] if run.fused else []
    side = "sets" if run.calibrates else "judges"
    text = ", ".join(part for part in parts if part)
    error = 100 * (value / published - 1)
    return f"| {side} | {text} | {_number(published)} | {_number(value)} | {error:+.0f} % |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def speed_row(run: Run) -> str:
    assert run.speed
    text = row(run, run.speed, run.speed * (1 + error_of(run)))
    return text.replace(
        f" {_number(run.speed)} |", f" {_number(run.speed)} {_UNITS[run.unit]} |", 1
    )


def memory_row(run: Run) -> str:
    assert run.gib
    return row(run, run.gib, memory_of(run))


def of_rows(rows: Iterable[str], side: str = "judges") -> list[int] | None:
    """Return the errors of the rows of a side, as they are printed; None without one."""
    found = [match for line in rows if (match := _ROW.match(line)) and match[1] == side]
    if not found:
        return None
    return [len(found), *(round(100 * e) for e in spread(int(m[2]) / 100 for m in found))]


def tables(page: str) -> dict[str, list[str]]:
    """Return the rows of a page by class."""
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = {p.partition("\n")[0]: [x for x in p.splitlines() if _ROW.match(x)] for p in parts}
    return {name: rows for name, rows in found.items() if rows}


def by_gpu(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the rows that count by the GPU of their runs."""
    counted = [
        x for name, rows in found.items() if name not in (*_NO_SPEED, *LISTS.values()) for x in rows
    ]
    gpus = {
        hardware: [x for x in counted if f" {name}, " in x] for hardware, name in _NAMES.items()
    }
    assert sum(map(len, gpus.values())) == len(counted)
    return gpus


def summary(found: dict[str, list[str]], what: str = "Class") -> Iterator[str]:
    heads = "Runs that judge | Median | 90th percentile | Worst | Runs that set | Median"
    yield f"| {what} | {heads} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, rows in found.items():
        cells = [name]
        for side, numbers in (("judges", 4), ("sets", 2)):
            of = of_rows(rows, side)
            cells += (
                ["none", *[""] * (numbers - 1)]
                if of is None
                else [str(of[0]), *(f"{n} %" for n in of[1:numbers])]
            )
        yield f"| {' | '.join(cells)} |"


def page(found: dict[str, list[str]]) -> str:
    """Return the page with the errors of these rows; what stands above its table stays."""
    table = "".join(f"{line}\n" for line in summary(found))
    return PAGE.read_text().partition("| Class |")[0] + table


def rows_page(found: dict[str, list[str]]) -> str:
    """Return the sources and the rows of each class."""
    gpus = {_NAMES[name]: rows for name, rows in by_gpu(found).items()}
    parts = ["# Published runs beside their predictions\n\nThe speeds by GPU:\n\n"]
    parts += [*(f"{line}\n" for line in summary(gpus, "GPU")), "\n## Sources\n\n"]
    for name, source in SOURCES.items():
        side = "sets constants" if source.calibrates else "judges"
        parts.append(f"- {name}, {source.date}: {source.url}. It {side}.\n")
    for name, rows in found.items():
        unit = "GiB of a GPU" if name in (MEMORY, APART) else "per GPU"
        parts.append(f"\n## {name}\n\n| | Run | Published, {unit} | Predicted | Error |\n")
        parts.append("| --- | --- | --- | --- | --- |\n" + "".join(f"{line}\n" for line in rows))
    return "".join(parts)


def computed() -> dict[str, list[str]]:
    """Return all rows by class."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in sorted(runs(), key=lambda run: run.calibrates):
        if run.speed:
            found[named_class(run)].append(speed_row(run))
    lists = [*LISTS.values()]
    found = {name: found[name] for name in sorted(found, key=lambda n: (n in lists, n))}
    for run in sorted(runs(), key=lambda run: run.calibrates):
        if run.gib:
            found.setdefault(named_memory(run), []).append(memory_row(run))
    return found


def product_lines(found: dict[str, list[str]]) -> str:
    """Return the lines of errors.yaml that have the errors of the classes."""
    errors = {
        n: of
        for n, rows in found.items()
        if n not in (*LISTS.values(), MEMORY, APART) and (of := of_rows(rows))
    }
    of_memory = of_rows(found[MEMORY]) or [0, 0, 0, 0]
    text = _table("speed", errors) + _table("by gpu", errors_by_gpu(found))
    return f"{text}memory: {of_memory}\n"


def errors_by_gpu(found: dict[str, list[str]]) -> dict[str, list[int]]:
    """Return the errors of the GPUs that have a file in conf/hardware."""
    errors = {name: of_rows(rows) for name, rows in by_gpu(found).items() if name in known()}
    return {name: of for name, of in errors.items() if of}


def _table(name: str, errors: dict[str, list[int]]) -> str:
    return f"{name}:\n" + "".join(f"  {each}: {of}\n" for each, of in errors.items())


def main() -> None:
    found = computed()
    PAGE.write_text(page(found))
    ROWS.write_text(rows_page(found))
    file = Path(accuracy.__file__).with_name("errors.yaml")
    head = [line for line in file.read_text().splitlines(keepends=True) if line[0] == "#"]
    file.write_text("".join(head) + product_lines(found))


if __name__ == "__main__":
    main()
