"""`python -m hpctrain resume --branch RUN [KEY=VALUE...]`: a run that goes on from a checkpoint.

    checkpoint of the parent ── linked, its manifest with the new position of the journal ──┐
    metrics of the parent up to its step ── copied ─────────────────────────────────────────┤ run
    config of the parent ── overrides ── checkpoint.branch_digest ── a name of its own ─────┘

The new run has the weights, the optimizer, the random state and the position in the data, so its
next samples are those that its parent would have had.
"""

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.terminal.terminal import exact
from hpctrain.commands.select import add_choice, one_run
from hpctrain.config.frozen import executed, load
from hpctrain.runs import trust
from hpctrain.runs.checkpoints.manifest import NAME, Manifest
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.code import trained_code
from hpctrain.runs.freeze import check, freeze
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import journal


def main(argv: list[str]) -> int:
    """Write the directory of the new run, and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain resume --branch",
        description="Make a new run that goes on from a checkpoint of another one, with its "
        "history and its next samples. KEY=VALUE changes any key of its config: a larger "
        "train.max_steps prolongs a finished run. `python -m hpctrain resume NAME`, or `run DIR`, "
        "then starts it.",
    )
    add_choice(parser)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="keys that change")
    trust.add_argument(parser)
    options = parser.parse_intermixed_args(argv)
    if wrong := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{wrong[0]}: branch takes one run, and KEY=VALUE for what changes")
    parent = one_run(options.dir, options.run, "resume --branch")
    run = branch(parent, options.overrides, options.step, best=options.best)
    print(run.path, file=exact())
    return 0


def branch(
    parent: Path, overrides: list[str], step: int | None = None, *, best: bool = False
) -> RunDir:
    """Write the directory of a run that goes on from a checkpoint of another one.

    If it exists already, with steps of its own, it is left as it is. Without a step it is the
    newest checkpoint that is intact. It is a ConfigError if nothing would be left to train.
    """
    before = RunDir.open(parent)
    config = load(before.config_file, overrides)
    trust.check(before.path, executed(config))
    checkpoint = chosen_checkpoint(before, step, best=best)
    found = Manifest.read(checkpoint)
    if not any(text.startswith("output_dir=") for text in overrides):
        config.output_dir = str(before.path.parent)
    config.checkpoint.branch_digest = WeightFiles(checkpoint, None).digest()
    limit = config.train.max_steps
    if limit is not None and found.step >= limit:
        raise ConfigError(
            f"train.max_steps={limit}: the checkpoint of {before.name} is of step {found.step}, so "
            f"nothing would be left to train; give a larger one, or an earlier --step"
        )
    run = check(config)
    if (run.path / "run.json").is_file():
        return run
    freeze(config, run)
    run.update(parent={"run": str(before.path), "uid": before.read().uid, "step": found.step})
    trained_code.inherit(before, run)
    position = _copy_history(before.path, run.path, int(found.progress["tracker"]))
    _take_over(checkpoint, run.checkpoints / checkpoint.name, found, position)
    return run


def _take_over(checkpoint: Path, final: Path, found: Manifest, position: int) -> None:
    """Link the files of a checkpoint, which never change, and write its manifest anew."""
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name in found.files:
            try:
                os.link(checkpoint / name, temporary / name)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(checkpoint / name, temporary / name)
        progress = found.progress | {"tracker": position}
        replace(found, progress=progress).write(temporary)
        assert (temporary / NAME).is_file()
        temporary.rename(final)
    except OSError as error:
        raise StorageError(f"{final}: cannot be written ({error.strerror})") from error


def _copy_history(parent: Path, run: Path, end: int) -> int:
    """Write the parent's metrics before `end` into the run's journal; return its new end."""
    source, target = journal.journal_path(parent), journal.journal_path(run)
    records = [(record.body["kind"], record) for record in journal.read_all(source, end=end)]
    bodies = [record.body for kind, record in records if kind == "superseded"]
    gone = [(int(body["from"]), int(body["to"])) for body in bodies]
    kept = [
        record.body | {"attempt": 0}
        for kind, record in records
        if kind == "metrics" and not any(a <= record.start < b for a, b in gone)
    ]
    if not kept:
        return 0
    target.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(body, separators=(",", ":")) + "\n" for body in kept)
    target.write_text(text)
    return len(text.encode())
