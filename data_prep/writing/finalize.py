"""Make a data set of finished pieces: name the shards, write the index, publish all at once."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import h5py
import numpy as np

from data_prep.console import size
from data_prep.source import BadRecord
from data_prep.writing.commit import PARTIAL, commit, discard, settle, writable
from data_prep.writing.job import JOB, Conversion
from data_prep.writing.moments import Moments
from data_prep.writing.records import ConversionPlan, Result
from data_prep.writing.split import Fractions, Split, left_empty, parse_split
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.terminal.terminal import few
from hpctrain.base.version import __version__
from hpctrain.data.shards.index import Index, Shard, Statistics
from hpctrain.data.shards.shard import digest_file, shard_name

REPORT = "problems.jsonl"  # in OUT: the records that could not be used
BESIDE = "beside"  # key in the provenance: {file: digest}, see `Source`
SHOWN = 3  # problems or parts that a message lists


def finalize(job: Conversion) -> Index:
    """Put the pieces of a job together."""
    plan, out = job.plan, job.out
    missing = sorted(set(range(plan.pieces)) - job.pieces.done())
    if missing:
        raise DataError(_missing(plan, out, missing))
    results = [job.pieces.result(number) for number in range(plan.pieces)]
    problems = [problem for result in results for problem in result.problems]
    if problems and plan.on_error != "skip":  # of an earlier --on-error skip, or collect of before
        raise DataError(f"{problems[0]}; --on-error skip leaves such records out")
    with writable(out):
        _report(out, problems)
        shards, moves = _named(job, results)
        if not shards:
            discard(out)
            why = f": {_listed(out, problems)}" if problems else ""
            source = plan.provenance.get("source", {}).get("from", ())
            named = [source] if isinstance(source, str) else [*source][:SHOWN]
            why = "".join(f": {name}" for name in [", ".join(named)] if name) + why
            raise DataError(f"nothing to write into {out}: the source has no samples{why}")
        beside = _beside(job)
    moves.update({name: name for name in beside})
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result.skipped)
    index = Index(
        fields=plan.fields,
        shards=tuple(shards),
        statistics=statistics_of(result.moments for result in results),
        provenance={
            **plan.provenance,
            "left_out": {"unusable": len(problems), **skipped},
            **({BESIDE: beside} if beside else {}),
        },
        categories=plan.categories,
        group=plan.group,
    )
    commit(out, index, moves)
    return index


def statistics_of(
    found: Iterable[Mapping[str, Mapping[str, Moments]]],
) -> dict[str, dict[str, Statistics]]:
    """Return the statistics by split and field, of those of parts."""
    moments: dict[str, dict[str, Moments]] = defaultdict(dict)
    for part in found:
        for split, fields in part.items():
            for name, those in fields.items():
                into = moments[split].setdefault(name, Moments.among(len(fields)))
                into.merge(those)
    return {
        split: {name: values.result() for name, values in fields.items()}
        for split, fields in moments.items()
    }


def made_by(command: str) -> dict[str, Any]:
    """Return the command line, the time, and the versions that the bytes depend on; JSON."""
    return {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "hpctrain": __version__,
            "python": python_version(),
            "numpy": np.__version__,
            "h5py": h5py.version.version,
            "hdf5": h5py.version.hdf5_version,
        },
    }


def finalize_parts(out: Path) -> Index:
    """Put the parts in a folder together, unless that has been done already."""
    settle(out)
    if (out / PARTIAL / JOB).exists():
        with Conversion(out) as job:
            if job.load():
                return finalize(job)
    try:
        return Index.load(out)
    except DataError as error:
        raise DataError(f"{out} holds no parts to put together; {error}") from None


def summary(index: Index) -> str:
    """Return `1797 samples (train 1415, val 382) in 2 shards, …`, and lines on what is missing."""
    counts = {name: index.split(name).count for name in index.splits}
    count = sum(counts.values())
    nbytes = sum(shard.bytes for shard in index.shards)
    shards = _counted(len(index.shards), "shard")
    splits = ", ".join(f"{name} {count}" for name, count in counts.items())
    lines = [f"{_counted(count, 'sample')} ({splits}) in {shards}, {size(nbytes)}, {index.digest}"]
    options, left_out = index.told("options"), index.told("left_out")
    asked: Split | None = None  # the rule that made the splits, if data_prep has converted the data
    with suppress(ConfigError):
        asked = parse_split(str(options.get("split", "")))
    group = options.get("group") or index.group
    if group:
        line = f"each {group} is in one split"
        if isinstance(asked, Fractions) and len(asked.fractions) > 1:
            parts = (
                f"{name} {counts.get(name, 0) / count:.4g} (asked {fraction:g})"
                for name, fraction in asked.fractions.items()
            )
            line += f": {', '.join(parts)}"
        lines.append(line)
    if asked is not None and (empty := left_empty(asked, index.splits)):
        lines.append(empty)
    if left_out.get("unusable"):
        records = _counted(left_out["unusable"], "record")
        lines.append(f"{records} could not be used: see {REPORT}")
    if left_out.get("empty"):
        lines.append(f"{_counted(left_out['empty'], 'empty record')} left out")
    for name in index.fields:
        statistics = [fields[name] for fields in index.statistics.values() if name in fields]
        if bad := sum(values.nonfinite for values in statistics):
            lines.append(f"{name} has {bad} NaN or infinite values; --nan refuse would say where")
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _missing(plan: ConversionPlan, out: Path, missing: list[int]) -> str:
    gone = set(missing)
    parts = [part for part in range(1, plan.parts + 1) if gone & set(plan.share(part))]
    what = f"{out}: {len(missing)} of {plan.pieces} pieces are missing"
    if not parts:
        return f"{what}; the command that was interrupted goes on: {plan.command}"
    shown = few((f"{part}/{plan.parts}" for part in parts), SHOWN)
    which = f"part {shown} is" if len(parts) == 1 else f"parts {shown} are"
    return f"{what}: {which} not done; {plan.command} --part {parts[0]}/{plan.parts}"


def _named(job: Conversion, results: list[Result]) -> tuple[list[Shard], dict[str, str]]:
    """Return the shards by split, in the order of the pieces, and the present path of each."""
    found: dict[str, list[tuple[int, Shard]]] = {split: [] for split in job.plan.splits}
    for number, result in enumerate(results):
        for shard in result.shards:
            found.setdefault(shard.split, []).append((number, shard))
    shards, moves = [], {}
    for split, members in found.items():
        for i, (number, shard) in enumerate(members):
            shards.append(replace(shard, path=shard_name(split, i)))
            moves[shards[-1].path] = job.pieces.path(number, shard.path)
    return shards, moves


def _beside(job: Conversion) -> dict[str, str]:
    """Write the files that stand beside the shards; return the digest of each."""
    digests = {}
    for name, content in job.plan.beside.items():
        write_atomically(job.folder / name, content)
        digests[name] = digest_file(job.folder / name)
    return digests


def _report(out: Path, problems: list[BadRecord]) -> None:
    """Write the list of the records that could not be used, or remove an old one."""
    if problems:
        write_atomically(out / REPORT, "".join(f"{json.dumps(vars(p))}\n" for p in problems))
    else:
        (out / REPORT).unlink(missing_ok=True)


def _listed(out: Path, problems: list[BadRecord]) -> str:
    records = _counted(len(problems), "record")
    return f"{records} could not be used, all in {out / REPORT}: {few(problems, SHOWN, '; ')}"
