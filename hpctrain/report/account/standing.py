"""What a run is and how it stands, in sentences: its page begins with them.

verdict   The run is finished after 8,800 steps in 2 min; val/accuracy is 0.979
facts     command, overrides, model, data, code, hosts, MLflow, logs
why       why an attempt ended
"""

import math
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from hpctrain.causes import named, one_line
from hpctrain.console import shortened
from hpctrain.disk import text_of
from hpctrain.job.summary import pages_of
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.time_parts import Span
from hpctrain.runs.code import provenance
from hpctrain.runs.state.state import eta_s
from hpctrain.secrets import mask
from hpctrain.units import duration

_STANDS = {  # of the states that do not go on "is"
    "failed": "has failed",
    "interrupted": "was stopped",
    "running": "is in progress",
    "requeued": "was stopped and waits in the queue to go on",
    "queued": "waits in the queue",
    "created": "has not begun",
}
_LONGEST = 300  # characters of a reason; `logs` and --json have all of it


class Fact(NamedTuple):
    """A row about a run: a text, in which code stands between backquotes, and where it leads."""

    name: str
    text: str
    link: str = ""


def verdict(account: RunAccount) -> str:
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


def why(span: Span) -> str:
    """Return why an attempt ended; "" if it runs, or has made all of its steps."""
    if span.runs:
        return ""
    if span.killed:
        known = span.scheduler not in ("", "COMPLETED", "RUNNING")
        return "no end was recorded" + (f"; Slurm says {span.scheduler}" if known else "")
    text = named(span.facts.cause, one_line(span.facts.error or span.facts.reason))
    return shortened(text, _LONGEST)


def command(account: RunAccount) -> str:
    """Return the command that makes this run; "" if its overrides are not known."""
    record = account.facts.record
    words = ["-m"] * bool(record.submission) + [mask(text) for text in record.words]
    return f"python -m hpctrain {shlex.join(words)}" if record.overrides else ""


def facts(account: RunAccount) -> Iterator[Fact]:
    """Yield what the run is; what is not known is left out."""
    path, record = account.facts.path, account.facts.record
    if text := command(account):
        yield Fact("command", f"`{text}`")
        yield Fact("overrides", " ".join(f"`{mask(each)}`" for each in record.overrides))
    made = text_of(path / "artifacts" / "model.txt").partition("\n")[0][:_LONGEST].strip()
    made = made.removeprefix("model ")
    yield Fact("model", made or str(account.value("model._target_", "not known")))
    for content in account.history.data.values() or [account.value("data.path", "not known")]:
        yield Fact("data", str(content))
    if commit := provenance.commit(path / "provenance"):
        changed = ", with changes that are not committed" * commit.endswith("-dirty")
        source = mask(provenance.source(path / "provenance"))
        yield Fact("code", f"{source} at `{commit.removesuffix('-dirty')}`{changed}")
    if account.spans:
        first, last = account.spans[0], account.spans[-1]
        versions = last.facts.environment.items()
        yield Fact("software", ", ".join(f"{key} {value}" for key, value in versions))
        end = "now" if last.runs else date(last.end)
        yield Fact("time", f"{date(first.begin)} to {end}")
        ranks = last.facts.world_size
        started = f"{ranks} rank{'s' * (ranks > 1)}, launcher {last.facts.launcher}"
        nodes = dict.fromkeys(host for span in account.spans for host in account.hosts(span))
        yield Fact("hosts", f"{', '.join(nodes)} ({started})")
        jobs = filter(None, (span.facts.job_id for span in account.spans))
        if text := ", ".join(dict.fromkeys(jobs)):
            yield Fact("jobs", text)
    if pages := pages_of(path):
        yield Fact("MLflow", pages[0], pages[0])
    yield Fact("logs", str(path / "logs"), (path / "logs").absolute().as_uri())
    yield Fact("", f"`python -m hpctrain logs {shlex.quote(str(path))}`")


def date(time: float) -> str:
    """Return a local time as people write it."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
