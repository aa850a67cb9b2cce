"""What a report tells of one run: what it is, how it stands, what it took, and what to change."""

import math
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime

from hpctrain.base.files.disk import text_of
from hpctrain.base.processes.causes import named, one_line
from hpctrain.base.secrets import mask
from hpctrain.base.terminal.console import shortened
from hpctrain.base.units import duration
from hpctrain.commands.state import eta_s
from hpctrain.insight.report.account.advice import notes
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.account.time_parts import PARTS, Span
from hpctrain.insight.report.tree import (
    Bars,
    Chart,
    Curves,
    Fact,
    Pairs,
    Rows,
    Section,
    Sentences,
    number,
)
from hpctrain.runs.code import provenance
from hpctrain.tracking.links import pages_of

_STANDS = {  # of the states that do not go on "is"
    "failed": "has failed",
    "interrupted": "was stopped",
    "running": "is in progress",
    "requeued": "was stopped and waits in the queue to go on",
    "queued": "waits in the queue",
    "created": "has not begun",
}
_LONGEST = 300  # characters of a reason; `logs` and --json have all of it
_LEAST_PART_S = 0.0005  # a shorter one is shown as 0


def tree(account: RunAccount, charts: Sequence[Chart] = ()) -> list[Section]:
    """Return the report of a run, whose facts for programs are None where they are not known.

    Seconds are those of the allocations, and the parts of `time` add up to `allocated`.
    """
    metrics = sorted(account.history.metrics.items())
    for_programs = [
        Fact("run", account.name),
        Fact("path", str(account.facts.path)),
        Fact("state", account.state.name),
        Fact("reason", account.state.reason),
        Fact("as_of", account.now),
        Fact("swept", account.swept),
        Fact("step", account.step),
        Fact("metrics", {name: each.last() for name, each in metrics}),
    ]
    return [
        Sentences("", "", [f"{sentence(account)} As of {_date(account.now)}."]),
        Pairs("", [*for_programs, *_about(account)]),
        Bars("Where the time went", "time", [*_parts(account)]),
        Sentences("Notes", "notes", notes(account)),
        Rows("Attempts", "attempts", [_attempt(account, span) for span in account.spans]),
        Pairs("Figures", [*_figures(account)]),
        Curves([*charts]),
        Sentences("Left out", "left_out", account.left_out),
    ]


def sentence(account: RunAccount) -> str:
    """Return how the run stands in one sentence: its state and why, its steps, its main metric."""
    text = "The run " + _STANDS.get(account.state.name, f"is {account.state.name}")
    if account.spans:
        total = account.facts.progress.max_steps
        of = f" of {total:,}" if total is not None and total > account.step else ""
        text += f" after {account.step:,}{of} steps in {duration(account.time['allocated'])}"
        text += f" and {len(account.spans)} attempts" if len(account.spans) > 1 else ""
    if reason := one_line(account.state.reason):
        text += f": {shortened(reason, _LONGEST)}"
    if account.spans and account.spans[-1].runs:
        left = eta_s(account.facts, account.now)
        text += f"; about {duration(left)} to go" if left is not None else ""
    value, best = account.final(account.metric), account.best
    if math.isfinite(value):
        text += f"; {account.metric} is {value:.4g}"
        if best and best["metric"] == account.metric and best["value"] != value:
            text += f", and was best at step {best['step']:,} with {best['value']:.4g}"
    return f"{text}."


def command(account: RunAccount) -> str:
    """Return the command that makes this run; "" if its overrides are not known."""
    record = account.facts.record
    words = ["-m"] * bool(record.submission) + [mask(text) for text in record.words]
    return f"`python -m hpctrain {shlex.join(words)}`" if record.overrides else ""


def _about(account: RunAccount) -> Iterator[Fact]:
    """Yield what the run is; what is not known has no text."""

    def fact(name: str, text: object, link: str = "") -> Fact:
        return Fact("", None, name, str(text), link)

    path = account.facts.path
    yield fact("command", command(account))
    made = text_of(path / "artifacts" / "model.txt").partition("\n")[0][:_LONGEST].strip()
    yield fact("model", made.removeprefix("model ") or account.value("model._target_", ""))
    for content in account.history.data.values() or [account.value("data.path", "")]:
        yield fact("data", content)
    source, commit = provenance.origin(path / "provenance")
    if commit:
        changed = ", with changes that are not committed" * commit.endswith("-dirty")
        yield fact("code", f"{mask(source)} at `{commit.removesuffix('-dirty')}`{changed}")
    elif source:
        yield fact("code", f"{source}, in no git repository with a commit")
    if account.spans:
        first, last = account.spans[0], account.spans[-1]
        versions = last.facts.environment.items()
        yield fact("software", ", ".join(f"{key} {value}" for key, value in versions))
        yield fact("time", f"{_date(first.begin)} to {'now' if last.runs else _date(last.end)}")
        ranks = last.facts.world_size
        started = f"{ranks} rank{'s' * (ranks > 1)}, launcher {last.facts.launcher}"
        nodes = dict.fromkeys(host for span in account.spans for host in account.hosts(span))
        yield fact("hosts", f"{', '.join(nodes)} ({started})")
        jobs = filter(None, (span.facts.job_id for span in account.spans))
        yield fact("jobs", ", ".join(dict.fromkeys(jobs)))
    yield from (fact("MLflow", page, page) for page in pages_of(path)[:1])
    yield fact("logs", path / "logs", (path / "logs").absolute().as_uri())


def _parts(account: RunAccount) -> Iterator[Fact]:
    time = account.time
    yield Fact("allocated", time["allocated"])
    for key, title in PARTS.items():
        text = duration(time[key]) if time[key] >= _LEAST_PART_S else ""
        yield Fact(key, time[key], title, text)


def _attempt(account: RunAccount, span: Span) -> list[Fact]:
    hosts, ended = account.hosts(span), _why(span)
    return [
        Fact("attempt", span.number, "attempt", str(span.number)),
        Fact("state", span.state, "state", span.state),
        Fact("why", ended, "why it ended", ended),
        Fact("begin", span.begin),
        Fact("seconds", round(span.seconds, 3), "time", duration(span.seconds)),
        Fact("first_step", span.first_step, "steps", f"{span.first_step:,}-{span.reached:,}"),
        Fact("reached", span.reached),
        Fact("time", {name: round(value, 3) for name, value in span.parts.items()}),
        Fact("", None, "lost", duration(span.parts["lost"])),
        Fact("hosts", hosts, "hosts", ", ".join(hosts)),
        Fact("world_size", span.facts.world_size),
        Fact("job_id", span.facts.job_id),
    ]


def _why(span: Span) -> str:
    """Return why an attempt ended; "" if it runs, or has made all of its steps."""
    if span.runs:
        return ""
    if span.killed:
        known = span.scheduler not in ("", "COMPLETED", "RUNNING")
        return "no end was recorded" + (f"; Slurm says {span.scheduler}" if known else "")
    text = named(span.facts.cause, one_line(span.facts.error or span.facts.reason))
    return shortened(text, _LONGEST)


def _figures(account: RunAccount) -> Iterator[Fact]:
    if not account.spans:
        return
    usage, best, (cost, currency) = account.usage, account.best, account.cost or (None, "")
    share, queue_s = account.goodput, account.queue_s
    yield Fact("queue_s", queue_s, "in the queue", duration(queue_s) if queue_s else "")
    yield Fact("goodput", share, "goodput", "" if share is None else f"{100 * share:.1f}%")
    yield number("gpu_hours", account.gpu_hours, "GPU-hours", "{:.3g}")
    yield number("idle_gpu_hours", usage.idle_gpu_hours(), "GPU-hours idle", "{:.3g}")
    name = "" if account.gpu_hours else "core-hours"
    yield number("core_hours", account.core_hours, name, "{:.3g}")
    yield number("kwh", usage.kwh(), "energy", "{:.3g} kWh")
    yield number("cost", cost, "cost", "{:.2f} " + currency)
    yield Fact("currency", currency or None)
    yield number(
        "gpu_utilization_percent", usage.mean("utilization_percentage"), "GPU use", "{:.0f}%"
    )
    yield number("gpu_memory_gib", account.gpu_memory_gib, "peak GPU memory", "{:.1f} GiB")
    yield number("", usage.mean("cpu_utilization_percentage"), "cores", "{:.0f}%")
    yield number(
        "memory_gb",
        usage.peak("system_memory_usage_megabytes", 1000),
        "peak memory",
        "{:.2f} GB of a node",
    )
    text = f"{best['value']:.5g} at step {best['step']:,}" if best else ""
    yield Fact("best", best, f"best {best['metric']}" if best else "", text)


def _date(time: float) -> str:
    """Return a local time as people write it."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
