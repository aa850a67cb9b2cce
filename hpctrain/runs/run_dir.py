"""A run is a directory, and everything about it is inside.

    runs/digits-3fa92c1b/
        config.yaml    resolved, frozen when the run was first asked for: what every rank reads
        run.json       signature, state, submission, attempts, result
        provenance/    commit, changes and package versions (see `hpctrain.runs.provenance`)
        progress.json  the last step and metrics, while it runs
        stop           somebody wants it to stop for good (see `hpctrain.runs.stop_request`)
        logs/          what the ranks print under Slurm, one file a rank
        checkpoints/   step-00000200/ …
        journal/       what is tracked, before MLflow has it

The name is content-addressed: the hash of what decides the result (`config.identity`). So the
same command finds the same directory and continues there, and two runs never share one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import dump
from hpctrain.config.identity import signature
from hpctrain.config.schema import Config
from hpctrain.disk import set_aside, write_atomically
from hpctrain.errors import StorageError


class RunDir:
    """One run's directory.

    States of run.json: "created" (frozen), "queued" (in the scheduler), "running", "interrupted"
    (stopped and saved), "failed", "finished". A run that was given to the scheduler has a
    `submission`: the path of the script, the number of its array task, user and time.
    """

    def __init__(self, path: Path, data_digest: str = "") -> None:
        self.path, self.data_digest = path, data_digest

    @classmethod
    def of(cls, config: Config, data_digest: str) -> RunDir:
        """The directory of this config; nothing is written."""
        name = f"{config.name}-{signature(config, data_digest)}"
        return cls(Path(config.output_dir) / name, data_digest)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing directory.

        Raises:
            StorageError: it was never frozen, not to the end, or is damaged.
        """
        run = cls(Path(os.path.realpath(path)))
        for name in ("config.yaml", "run.json"):
            if not (run.path / name).is_file():
                raise StorageError(f"{path}: no run directory ({name} is missing)")
        for key in ("signature", "data_digest"):
            if key not in run.read():
                raise StorageError(f"{run.path}/run.json is damaged (it has no {key!r})")
        return run

    @property
    def name(self) -> str:
        """For people: the last part of the path."""
        return self.path.name

    @property
    def config_file(self) -> Path:  # noqa: D102
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:  # noqa: D102
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:  # noqa: D102
        return self.path / "logs"

    @property
    def provenance(self) -> Path:  # noqa: D102
        return self.path / "provenance"

    def freeze(self, config: Config, sync: bool = True, **facts: Any) -> None:
        """Write the directory and its config; a second time is a re-launch of the same run.

        Args:
            config: what `of` was given.
            sync: wait for the disk; one who freezes many calls `disk.sync_file_system` once.
            facts: further values for run.json, at the same stroke.

        Raises:
            StorageError: no permission or no space.
        """
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_file, dump(config), sync)
            with self._change(sync) as content:
                if not content:
                    content |= {
                        "uid": uuid.uuid4().hex,  # finds the run in a shared MLflow
                        "signature": self.name.rpartition("-")[2],
                        "data_digest": self.data_digest,
                        "state": "created",
                        "attempts": [],
                    }
                content |= facts
        except OSError as error:
            raise StorageError(
                f"output_dir={config.output_dir}: cannot write {error.filename or self.path} "
                f"({error.strerror})"
            ) from error

    def archive(self) -> Path:
        """Keep the directory under another name, `NAME.1` and so on; the name is free then."""
        return set_aside(self.path)

    def read(self) -> dict[str, Any]:
        """The content of run.json; empty when there is none yet."""
        try:
            content = json.loads((self.path / "run.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise StorageError(f"{self.path}/run.json is damaged ({error})") from error
        except OSError as error:
            raise StorageError(
                f"{self.path}/run.json: cannot be read ({error.strerror})"
            ) from error
        if not isinstance(content, dict):
            raise StorageError(f"{self.path}/run.json is damaged (it has no keys)")
        return content

    def update(self, **values: Any) -> None:
        """Change some values of run.json."""
        with self._change() as content:
            content |= values

    def begin_attempt(self, **facts: Any) -> None:
        """Record that a process (world size, host, job) takes up the run."""
        with self._change() as content:
            content["state"] = "running"
            content["attempts"].append({"started": time.time(), **facts})

    def end_attempt(self, state: str, **facts: Any) -> None:
        """Record how the last attempt ended; `facts` go into it, a `result` to the top."""
        with self._change() as content:
            content["state"] = state
            content["result"] = facts.pop("result", content.get("result"))
            content["attempts"][-1] |= {"ended": time.time(), "state": state, **facts}

    @contextmanager
    def _change(self, sync: bool = True) -> Iterator[dict[str, Any]]:
        """Read, change, write: alone, for a job may begin while its submission is noted."""
        with (self.path / ".run.json.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = self.read()
            yield content
            text = json.dumps(content, indent=2) + "\n"
            write_atomically(self.path / "run.json", text, sync)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one job; the kernel releases it with the process.

        Raises:
            StorageError: another process holds it.
        """
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise StorageError(
                    f"{self.path} is in use by {file.read().strip() or 'another process'}: "
                    "wait for it, or stop it"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def is_locked(self) -> bool:
        """Whether a process holds the directory now, as far as this host can see.

        Looks through a shared lock on the file as it is: taking the run, however short, would
        make a job that begins in that moment fail.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a file system without locks
        finally:
            os.close(descriptor)
        return False
