"""The code that a run was trained with: the file `modules.json` of its directory.

    attempt 1 ── builds the model ── modules.json: my_net.py, helper.py
    attempt 3 ── my_net.py differs ─ said, recorded in run.json ── modules.json: my_net.py, too

    {"version": 1, "records": [{"attempt": 1, "modules": {"my_net": {"file": …, "text": …}}},
                               {"attempt": 3, "modules": {"my_net": {…}, "helper": null}}]}

A training depends on its config and on its code. The config decides the name of the run; so that a
run which failed by an error in the code can go on with better code, the code does not. Then it is
said what has changed. A record has only what differs from those before, and null for what is gone.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Count, Record, read_known, written
from hpctrain.base.names.run_record import RunRecord
from hpctrain.runs.code import modules
from hpctrain.runs.code.modules import Module
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
CHOICE = (
    "name=OTHER makes another run of the same config; train.from_scratch=true keeps this directory "
    "under another name and starts at step 0"
)


class _Imported(Record, frozen=True):
    """The modules that an attempt has imported and the attempts before have not; None is gone."""

    attempt: Count
    modules: dict[str, Module | None]


class _File(Record, frozen=True):
    LARGEST, VERSION = 256 << 20, 1

    records: tuple[_Imported, ...]


def record(run: RunDir, called: Iterable[str], known: Collection[str]) -> None:
    """Note with which modules the last attempt trains, if they are others than before.

    `called` are the `_target_` of its config, and `known` the names of modules that the process had
    when its first training began.
    """
    records = _records(run.path)
    packages = {target.partition(".")[0] for target in called}
    now: dict[str, Module | None] = {**modules.loaded(known, packages)}
    if records:
        now = _changed(_merged(records), now)
    if now:
        _write(run, [*records, _Imported(len(run.read().attempts), now)])


def _changed(
    before: Mapping[str, Module], imported: Mapping[str, Module | None]
) -> dict[str, Module | None]:
    """Return what a record must add to what was known before; nothing if the code is the same."""
    now: dict[str, Module | None] = {**modules.on_disk(before), **imported}
    if not modules.difference(before, now, ""):
        return {}
    changed = {name: module for name, module in now.items() if before.get(name) != module}
    return changed | dict.fromkeys(before.keys() - now.keys())


def inherit(parent: RunDir, run: RunDir, step: int) -> None:
    """Note the code of a parent's checkpoint, as if an attempt 0 of the run had made it."""
    last = _maker(parent.read(), step)
    if before := _merged([one for one in _records(parent.path) if one.attempt <= last]):
        _write(run, [_Imported(0, {**before})])


def changes(run: RunDir, folders: Sequence[Path] | None = None) -> str:
    """Return in one line how the code differs from that which made the checkpoints of a run.

    It is "" if nothing differs, or nothing is known, or nothing of an older training would go on.
    Modules are found as `modules.on_disk` does.
    """
    if not (records := _records(run.path)):
        return ""
    content, step = run.read(), run.last_checkpoint()
    finished = content.state == "finished"
    maker = len(content.attempts) if finished else _maker(content, step)
    known = [one for one in records if one.attempt <= maker]
    if not known or not (step or finished):
        return ""
    before, attempt = _merged(known), known[-1].attempt
    since = f"attempt {attempt}" if attempt else "the branch"
    return modules.difference(before, modules.on_disk(before, folders), since)


def warn(run: RunDir) -> None:
    """Log a warning if the code of now is not that which has made the checkpoints of a run."""
    if changed := changes(run):
        log.warning("%s was trained with other code than that of now: %s", run.name, changed)


def turning_points(content: RunRecord) -> dict[int, str]:
    """Return the steps of the checkpoints from which a run went on with other code, and which."""
    return {
        one.first_step or 0: one.code_changed
        for one in content.attempts
        if one.code_changed and not one.misfit
    }


def _maker(content: RunRecord, step: int) -> int:
    """Return the number, from 1, of the attempt that made a checkpoint; 0 if a parent had it."""
    attempts, reached = content.attempts, step
    for number in range(len(attempts), 0, -1):
        first = attempts[number - 1].first_step or 0
        if first < reached:
            return number
        reached = min(reached, first)
    return 0


def _records(path: Path) -> list[_Imported]:
    file = read_known(_File, path / "modules.json")
    return list(file.records) if file else []


def _write(run: RunDir, records: Sequence[_Imported]) -> None:
    write_atomically(run.path / "modules.json", written(_File(records=tuple(records))))


def _merged(records: Sequence[_Imported]) -> dict[str, Module]:
    found: dict[str, Module | None] = {}
    for one in records:
        found |= one.modules
    return {name: each for name, each in found.items() if each}
