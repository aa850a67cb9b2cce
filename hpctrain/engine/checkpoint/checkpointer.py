"""Checkpoints by torch.distributed.checkpoint (DCP): committed by a rename, or they do not exist.

    step-00000200.tmp/   every rank writes its files, syncs them and computes their digests
        manifest.json    rank 0 writes step, world size, progress, size and digest of every file
    step-00000200/       renamed, and the parent folder synced: the checkpoint is committed

A save never overwrites a checkpoint, since a SIGKILL while overwriting would destroy it. DCP loads
a flipped bit silently, so loading takes the newest checkpoint whose digests are right, and falls
back to an older one.
"""

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from hpctrain.base.errors import MisfitError, StorageError
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.data import generators
from hpctrain.engine.checkpoint import metadata_file
from hpctrain.engine.checkpoint.optimizer_state import OptimizerModes, OptimizerState
from hpctrain.engine.checkpoint.saved_state import (
    FiniteValues,
    Tensors,
    bytes_of,
    empty_of,
    joined,
    module_state,
    plain_name,
    random_states,
)
from hpctrain.engine.checkpoint.saving.committed import Committed
from hpctrain.engine.checkpoint.saving.proof import prove
from hpctrain.engine.checkpoint.saving.saves import Saves
from hpctrain.engine.checkpoint.starting_point import names_of_base
from hpctrain.engine.checkpoint.tensor_reader import TensorReader, misfit
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.runs.checkpoints import manifest
from hpctrain.runs.checkpoints.manifest import Manifest, Progress

log = logging.getLogger(__name__)
_SHARING = {"tp", "pp", "cp"}  # degrees of a layout whose ranks have the same samples
_KIND = "optimizer_kind"  # the class of the optimizer whose state the checkpoint has


class Checkpointer:
    """Saves and loads models, optimizers, random state and progress.

    The newest checkpoint whose parameters are finite is never removed.

    One model and one optimizer are saved as `model.*` and `optimizer.*`. Several have names, and
    are saved as `model.NAME.*` and `optimizer.NAME.*`. All models are on the same mesh.

    What a rank has for itself is saved as `random.*.RANK` and `parallel.RANK.*`. If the replicas of
    the model differ, all of them are saved as `replica.RANK.*`. Only the same number of ranks loads
    `parallel` and `replica`; another number of ranks starts from the replica of rank 0.

    `folder` holds one folder for each checkpoint, of which the newest `keep` are kept, and those of
    the steps that `kept` returns. A checkpoint that has an `average` is loaded into these tensors.
    `base` is the digest of the weights that the adapters of the model (LoRA) belong to: then its
    frozen parameters are neither saved nor loaded. "" saves the whole model. `states` are about the
    tensors that the optimizer keeps for a parameter.

    Attributes:
        wrong: What is not finite in the last checkpoint: a parameter or a buffer by its name, such
            as "buffer 1.running_var"; "" if all is.
        more: Tensors of others, saved as `kept.*`; None without.
        modes: The modes of the optimizer; a checkpoint is saved in the one for evaluations.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: RankInfo,
        model: ParallelModel | Mapping[str, ParallelModel],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        kept: Callable[[], Collection[int]] = tuple,
        average: Mapping[str, torch.Tensor] = {},
        base: str = "",
        states: int = 2,
    ) -> None:
        self.ranks, self.committed = ranks, Committed(folder, keep, kept)
        self.saves = Saves(self.committed, ranks)
        self.path = self.committed.path
        self._average, self._base = average, base
        self.models = dict(model) if isinstance(model, Mapping) else {"": model}
        optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
        self._spread, self.wrong = next(iter(self.models.values()), None), ""
        trained = {
            joined(name, plain_name(own)): parameter
            for name, each in self.models.items()
            for own, parameter in zip(each.names, each.parameters, strict=True)
        }
        self._optimizers = {name: OptimizerState(o, trained) for name, o in optimizers.items()}
        changed = [each.free_gathered for each in self.models.values()]
        self.modes = OptimizerModes([*optimizers.values()], trained, changed)
        self._finite = FiniteValues({name: each.module for name, each in self.models.items()})
        self._states = states
        self.more: Tensors | None = None
        self._own, self._replica = f"parallel.{ranks.rank}.", f"replica.{ranks.rank}."

    def exists(self, step: int) -> bool:
        """Return whether there is a checkpoint of a step, as rank 0 sees it; all ranks call it."""
        return bool(objects.broadcast(self.ranks.is_main and self.path(step).is_dir()))

    def prove(self) -> None:
        """Write a little before the first step; all ranks call this before `load_latest`.

        If the disk, its quota or a limit allows no checkpoint, it is a StorageError. If saves would
        stop the training for long, the processes are started that write in the background.
        """
        for optimizer in self._optimizers.values():
            optimizer.flat()  # which refuses what a checkpoint cannot hold
        layout, differ = self._layout, self._replicas_differ
        weights = sum(bytes_of(each.values()) for each in self._weights().values())
        trained = sum(bytes_of(each.parameters) for each in self.models.values())
        own = weights + self._states * trained + bytes_of(self._average.values())
        replicas = layout.get("dp_replicate", 1)
        replicas *= layout.get("cp", 1) if "dp_shard" not in layout else 1
        part = 2 * own if differ else own / replicas
        prove(self.saves, self.ranks, weights, part)

    def save(
        self, step: int, progress: Progress, best: int = 0, *, background: bool = False
    ) -> bool:
        """Write and commit a checkpoint; every rank calls this at the same step.

        `progress` is all else that the run needs to continue, as JSON, of which rank 0's is
        written. `best` is the step of the best checkpoint, which is kept; 0 if there is none. In
        the `background` it returns as soon as the state is copied, if there are writers.

        Returns whether all parameters are finite, and all buffers that were so at the start, the
        same on all ranks. Any other checkpoint is written for a look at it; no run resumes from it.
        Where it cannot be written (StorageError), older checkpoints stay as they are.
        """
        self.saves.finish()
        with self.modes.evaluating():
            for model in self.models.values():
                model.share_buffers()
            wrongs = objects.all_gather(self._finite.wrong())
            self.wrong = next(filter(None, wrongs), "")
            # A look at what is wrong must be possible when the run ends because of it.
            background &= self.saves.background and not self.wrong
            # Else DCP would take parts of "model" from several ranks, and these must fit together.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=self._replicas_differ)
            about = Manifest(
                *(step, self.ranks.world_size),
                progress=json.loads(json.dumps(progress)),  # the run goes on changing it
                files={},
                time=time.time(),
                layout=dict(self._layout),
                healthy=not self.wrong,
                base=self._base,
            )
            self.saves.begin(about, self._state(), planner, best, stage=background)
            if not background:
                self.saves.finish()
        return not self.wrong

    def load_latest(self) -> Progress | None:
        """Load the newest intact checkpoint and return its progress; None when there is none.

        That of another model is a MisfitError. Where none is intact, or its adapters belong to
        other weights, it is a StorageError.
        """
        path = self._newest()
        return None if path is None else self._load(path)

    def _load(self, path: Path) -> Progress:
        found = Manifest.read(path)
        content = b64encode(metadata_file.read(path)).decode() if self.ranks.is_main else None
        replicas = self._spread.mesh.replicas if self._spread is not None else ()
        reader = TensorReader(path, b64decode(objects.broadcast(content)), replicas)
        if found.base != self._base:
            raise StorageError(
                f"{path} belongs to other weights ({found.base or 'it has a whole model'}) than "
                f"this run ({self._base or 'which trains a whole model'})"
            )
        random, saved = random_states(self.ranks.rank), reader.saved
        # A rank that did not exist when the checkpoint was saved keeps the state of its seed; so do
        # all ranks, if others than then share samples and have to draw the same.
        now = self._layout
        alike = found.layout == now or not _SHARING & {*found.layout, *now}
        own_random = [key for key in random if alike and key in saved]
        to_load: dict[str, Any] = {key: random[key] for key in own_random}
        parts = self._own_parts(saved, found.world_size)
        mine = (key for key in parts if key.startswith(self._own))
        own = {key: made for key in mine if (made := empty_of(saved[key])) is not None}
        replica = self._replica if any(key.startswith(self._replica) for key in parts) else ""
        average, training = f"{replica}ema", f"{replica}training"
        weights = self._weights()
        every = {joined(m, n): value for m, held in weights.items() for n, value in held.items()}
        divided = self._layout.get("pp", 1) > 1
        if wrong := misfit(saved, every, f"{replica}model", divided=divided):
            raise MisfitError(f"{path} does not fit the model: {wrong}")
        named = {key.removeprefix(f"{_KIND}.") for key in saved if key.startswith(f"{_KIND}.")}
        if named != self._optimizers.keys() - {""}:
            raise MisfitError(
                f"{path} has the optimizers {', '.join(sorted(named)) or 'of another loop'}, and "
                f"this run has {', '.join(sorted(self._optimizers)) or 'none'}"
            )
        to_load |= {replica + joined("model", name): held for name, held in weights.items()}
        to_load |= {
            replica + joined("optimizer", name): self._wanted(reader, replica, name)
            for name in self._optimizers
        }
        to_load |= own | self._kept(saved, found.world_size)
        if self._average and reader.part(average):
            to_load[average] = dict(self._average)
        if reader.part(training):
            to_load[training] = self.modes.empty()
        reader.load(to_load)
        options = StateDictOptions(strict=not self._base)
        for name, model in self.models.items():
            held = to_load[replica + joined("model", name)]
            set_model_state_dict(model.module, held, options=options)
            start = self._own_of(name)
            here = [key for key in own if key.startswith(start)]
            model.load_state_dict({key.removeprefix(start): to_load[key] for key in here})
        for name, optimizer in self._optimizers.items():
            optimizer.load(to_load[replica + joined("optimizer", name)])
        self.modes.restore(to_load.get(training, {}))
        generators.restore({key.split(".")[1]: to_load[key] for key in own_random})
        return found.progress

    def _newest(self) -> Path | None:
        """Return the newest intact checkpoint; each rank verifies a part of its files."""
        ranks, untried = self.ranks, manifest.healthy(self.saves.folder)  # rank 0 goes through them
        while name := objects.broadcast(
            next((path.name for path in untried), "") if ranks.is_main else None
        ):
            path = self.saves.folder / str(name)
            with long_work("verifying the checkpoints"):
                damage = manifest.damage(path, ranks.rank, ranks.world_size)
            if not (damage := next(filter(None, objects.all_gather(damage)), "")):
                return path
            if ranks.is_main:
                log.warning(manifest.PASSED_OVER, path, damage)
                self.committed.damaged.add(path)
        if objects.broadcast(ranks.is_main and bool(manifest.checkpoints(self.saves.folder))):
            raise StorageError(manifest.NONE_INTACT % self.saves.folder)
        return None

    def _kept(self, saved: Mapping[str, Any], ranks: int) -> dict[str, torch.Tensor]:
        """Return what the tensors of `more` are loaded into, by their names in the checkpoint."""
        if self.more is None:
            return {}
        names = {key.removeprefix("kept."): key for key in saved if key.startswith("kept.")}
        mine = self.more.of_rank(names, ranks)
        made = {name: empty_of(saved[names[full]]) for name, full in mine.items()}
        self.more.loaded = {name: each for name, each in made.items() if each is not None}
        return {names[mine[name]]: tensor for name, tensor in self.more.loaded.items()}

    def _state(self) -> dict[str, Any]:
        """Return what this rank saves, its own included.

        Groups have names, since those of a pipeline's ranks differ.
        """
        state: dict[str, Any] = {joined("model", n): held for n, held in self._weights().items()}
        state |= random_states(self.ranks.rank)
        for name, optimizer in self._optimizers.items():
            state[joined("optimizer", name)] = optimizer.flat()
            state[joined(_KIND, name)] = optimizer.kind
        if self.modes.training:
            state["training"] = self.modes.training
        if self._average:
            state["ema"] = dict(self._average)
        if self.more is not None and self.more.tensors:
            state["kept"] = dict(self.more.tensors)
        for name, model in self.models.items():
            start = self._own_of(name)
            state |= {start + key: value for key, value in model.state_dict().items()}
        if self._replicas_differ:
            parts = [n for n in ("model", "optimizer", "ema", "training") if n in state]
            state |= {self._replica + name: state[name] for name in parts}
        return state

    def _own_of(self, name: str) -> str:
        """Return the beginning of the keys of what only this rank has of a model."""
        return f"{self._own}{name}." if name else self._own

    def _own_parts(self, saved: Iterable[str], ranks: int) -> list[str]:
        """Return the names in a checkpoint of `ranks` ranks that only this rank loads."""
        found = [key for key in saved if key.startswith(("parallel.", "replica."))]
        if ranks == self.ranks.world_size:
            return [key for key in found if key.startswith((self._own, self._replica))]
        if found and self.ranks.is_main:
            log.warning(
                "the checkpoint was saved by %d ranks, and there are %d now: the errors of "
                "compressed gradients, or the replicas of local SGD, start anew",
                *(ranks, self.ranks.world_size),
            )
        return []

    def _wanted(self, reader: TensorReader, replica: str, name: str) -> dict[str, Any]:
        """Return what the state of an optimizer is loaded into."""
        key = joined(_KIND, name)
        kind: dict[str, Any] = {key: ""} if key in reader.saved else {}
        if kind:
            reader.load(kind)
        part = reader.part(replica + joined("optimizer", name))
        return self._optimizers[name].wanted(part, kind.get(key, ""))

    @property
    def _layout(self) -> Mapping[str, int]:
        return self._spread.layout if self._spread is not None else {}

    @property
    def _replicas_differ(self) -> bool:
        return any(model.replicas_differ for model in self.models.values())

    def _weights(self) -> dict[str, dict[str, Any]]:
        """Return what is saved of the parameters and buffers of each model."""
        found = {}
        for name, model in self.models.items():
            held = module_state(get_model_state_dict(model.module))
            left_out = names_of_base(model.module) if self._base else ()
            found[name] = {key: value for key, value in held.items() if key not in left_out}
        return found
