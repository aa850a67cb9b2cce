"""Checkpoints by torch.distributed.checkpoint (DCP): committed by a rename, or they do not exist.

    step-00000200.tmp/   every rank writes its files, syncs them and computes their digests
        manifest.json    rank 0 writes step, world size, progress, size and digest of every file
    step-00000200/       renamed, and the parent folder synced: the checkpoint is committed

A save never overwrites a checkpoint, since a SIGKILL while overwriting would destroy it. DCP loads
a flipped bit silently, so loading takes the newest checkpoint whose digests are right, and falls
back to an older one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hpctrain.disk import sync
from hpctrain.distributed.long_work import long_work
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import StorageError

log = logging.getLogger(__name__)
Progress = dict[str, Any]


class Checkpointer:
    """Saves and loads model, optimizer, random state and progress.

    Args:
        folder: Holds one folder for each checkpoint.
        keep: Number of checkpoints that are kept; older ones are removed.
        ranks: The rank of this process.
        model: Wrapped or not; the checkpoint has the names of the plain model.
        optimizer: The optimizer of the model's parameters.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: RankInfo,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.model, self.optimizer = model, optimizer

    def save(self, step: int, progress: Progress) -> None:
        """Write and commit a checkpoint; every rank calls this at the same step.

        Args:
            step: Global step.
            progress: Everything else that the run needs to continue, as JSON; rank 0's is written.

        Raises:
            StorageError: There is no space or no permission. Older checkpoints stay as they are.
        """
        final = self.folder / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        if self.ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted save
        dist.barrier()
        try:
            dcp.save(self._state(), checkpoint_id=temporary)
            digests: list[dict[str, Any] | None] = [None] * self.ranks.world_size
            dist.all_gather_object(digests, dict(self._own_files(temporary)))
            if self.ranks.is_main:
                files = {name: facts for part in digests if part for name, facts in part.items()}
                manifest = {
                    "version": 1,
                    "step": step,
                    "world_size": self.ranks.world_size,
                    "progress": progress,
                    "files": files,
                }
                _write(temporary / "manifest.json", json.dumps(manifest, indent=1))
                sync(temporary)
                if final.exists():  # it is damaged, or the run would have resumed from it
                    shutil.rmtree(final)
                temporary.rename(final)
                sync(self.folder)
                self._remove_old()
        except (OSError, dcp.api.CheckpointException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise StorageError(f"{temporary}: the checkpoint was not written ({reason})") from error

    def load_latest(self) -> Progress | None:
        """Load the newest intact checkpoint and return its progress; None when there is none.

        Raises:
            StorageError: There are checkpoints, but none is intact.
        """
        chosen: list[str | None] = [None]
        with long_work("verifying the checkpoints"):
            if self.ranks.is_main:
                chosen = [self._newest_intact()]
        dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            return None
        if chosen[0] == "":
            raise StorageError(f"{self.folder}: no checkpoint is intact; see the warnings above")
        path = Path(chosen[0])
        state = self._state()
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        # A rank that did not exist when the checkpoint was saved keeps the state of its seed.
        random = {key: value for key, value in state.items() if key in saved and _is_random(key)}
        to_load = {key: value for key, value in state.items() if not _is_random(key)} | random
        dcp.load(to_load, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=to_load["model"],
            optim_state_dict=to_load["optimizer"],
        )
        if f"random.cpu.{self.ranks.rank}" in to_load:
            torch.set_rng_state(to_load[f"random.cpu.{self.ranks.rank}"])
        if f"random.cuda.{self.ranks.rank}" in to_load:
            torch.cuda.set_rng_state(to_load[f"random.cuda.{self.ranks.rank}"])
        progress: Progress = json.loads((path / "manifest.json").read_text())["progress"]
        return progress

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rank = self.ranks.rank
        state = {
            "model": model,
            "optimizer": optimizer,
            f"random.cpu.{rank}": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
        return state

    def _own_files(self, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Sync this rank's files and yield their digests; DCP names the files by rank."""
        patterns = [f"__{self.ranks.rank}_*"] + ([".metadata"] if self.ranks.is_main else [])
        for path in (p for pattern in patterns for p in folder.glob(pattern)):
            sync(path)
            yield path.name, {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}

    def _newest_intact(self) -> str | None:
        candidates = sorted(self.folder.glob("step-????????"), reverse=True)
        for path in candidates:
            problem = verify(path)
            if not problem:
                return str(path)
            log.warning("%s is not intact (%s); trying the one before", path, problem)
        return "" if candidates else None

    def _remove_old(self) -> None:
        for path in sorted(self.folder.glob("step-????????"))[: -self.keep]:
            # Renamed first, since a half-removed folder must not look like a checkpoint.
            doomed = path.with_suffix(".tmp")
            path.rename(doomed)
            shutil.rmtree(doomed)


def verify(path: Path) -> str:
    """Return what is wrong with the files of a checkpoint; "" when they fit the manifest."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name, facts in files.items():
            if (size := (path / name).stat().st_size) != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
            if _digest(path / name) != facts["xxh3_128"]:
                return f"the content of {name} has changed"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _is_random(key: str) -> bool:
    return key.startswith("random.")


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
