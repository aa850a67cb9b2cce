"""The keys of `data`: which samples are read, in which order, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import REQUIRED, key, section

_LARGEST_IMAGE = 2**15


def _check_size(size: list[int] | None) -> str:
    if size is None or (len(size) == 2 and 1 <= min(size) <= max(size) <= _LARGEST_IMAGE):
        return ""
    return f"it must be [height, width], 1 to {_LARGEST_IMAGE} each"


def _check_fold(fold: str | None) -> str:
    if fold is None:
        return ""
    found = re.fullmatch(r"(\d+)/(\d+)", fold)
    if found and int(found[1]) < int(found[2]) > 1:
        return ""
    return "it must be K/N: fold K, from 0 to N - 1, of N folds, 2 or more"


@dataclass
class _WindowsConfig:
    """Samples of equal length (windows) are cut from a variable-length field, such as tokens."""

    field: str | None = key(
        None, "Windows are cut from this field. Null uses the samples as they are stored."
    )
    length: int = key(
        1025,
        "Each window has this length. A language model needs its context length + 1.",
        count="elements",
    )
    stride: int | None = key(
        None,
        "The next window begins this far after the beginning of the one before. Null means "
        "`length`, so that windows do not overlap.",
        count="elements",
    )
    documents: bool = key(
        False, "Batches also get FIELD_document, which numbers the document of each element."
    )


@dataclass
class _ImagesConfig:
    """Images that are stored encoded (JPEG, PNG, ...) are decoded by threads as they are read."""

    field: str | None = key(None, "This field holds the encoded images. Null decodes nothing.")
    size: list[int] | None = key(
        None,
        "Images have this [height, width] after decoding. Null means the size of the first image.",
        unit="pixels",
        check=_check_size,
    )
    fit: str = key(
        "exact",
        "An image of another size is refused (exact), cropped or stretched.",
        choices=("exact", "crop", "stretch"),
    )


@dataclass
class _BucketsConfig:
    """Batches are made of samples of similar length, so that little is padded."""

    field: str | None = key(
        None, "Samples are sorted by the length of this variable-length field. Null does not sort."
    )


@dataclass
class DataConfig:
    """The data set that `python -m data_prep` wrote, and the order of its samples."""

    path: str = key(
        REQUIRED,
        "The data set is in this folder with index.json, or at this URL of such a folder (fsspec). "
        "The digest of the data set is part of the run's identity, the place is not.",
        identity=False,
    )
    train_split: str = key("train", "Training reads this split.")
    val_split: str | None = key("val", "Evaluation reads this split. Null means no evaluation.")
    val_sets: list[dict[str, Any]] = key(
        [],
        "Evaluation reads these data sets as well. Each is {name: ..., path: ..., split: ...}; "
        "without path it is `path`, without split val_split. The metrics of each are "
        "val/NAME/METRIC.",
    )
    fields: list[str] | None = key(None, "Only these fields are read. Null reads all of them.")
    windows: _WindowsConfig = section(_WindowsConfig)
    images: _ImagesConfig = section(_ImagesConfig)
    mixture: list[dict[str, Any]] = key(
        [],
        "Training draws from these data sets in place of `path`. Each of them is {name: ..., "
        "path: ..., weight: ..., split: ...}; weight and split may be left out.",
    )
    shuffle: str = key(
        "full",
        "Samples come in any order (full), in blocks that are read in one piece (block), or as "
        "they are stored (none).",
        choices=("full", "block", "none"),
    )
    window: int = key(64, "shuffle=block mixes the samples of this many blocks.", count="blocks")
    subset: str | None = key(
        None,
        "Training reads only these samples: START:STOP:STEP as in Python, or the indices in "
        "FILE.npy. Null reads the whole split.",
    )
    fold: str | None = key(
        None,
        "Cross-validation: K/N trains without fold K (from 0) of N folds of the training split, "
        "and evaluates on this fold in place of val_split. The seed decides the folds.",
        check=_check_fold,
    )
    group: str | None = key(
        None,
        "Samples with the same value of this field stay together: fold divides whole groups, and "
        "START:STOP:STEP of subset counts groups. For fold, null means the field of `data_prep "
        "--group`, if the data set was written with it.",
    )
    balance: str | None = key(
        None, "Each class of this field is drawn equally often. Null draws each sample once."
    )
    buckets: _BucketsConfig = section(_BucketsConfig)
    repeat: int = key(1, "Each sample comes this many times in an epoch.", at_least=1)
    collate: str = key(
        "pad",
        "Samples of a variable-length field are padded to the longest one, or packed end to end "
        "with their offsets.",
        choices=("pad", "pack"),
    )
    tail: str = key(
        "drop",
        "An incomplete last batch is dropped, or padded with rows that `mask` excludes.",
        choices=("drop", "pad"),
    )
    transforms: list[dict[str, Any]] = key(
        [],
        "These functions change each sample on the CPU. Each of them is {_target_: ...}; see "
        "hpctrain.data.workers.samples.",
    )
    batch_transforms: list[dict[str, Any]] = key(
        [],
        "These functions change each batch on the device. Each of them is {_target_: ...}; see "
        "hpctrain.data.transforms.",
    )
    val_transforms: list[dict[str, Any]] | None = key(
        None,
        "Evaluation uses these in place of `transforms`. Null means those of training that are "
        "not marked as random; one that is random is refused.",
    )
    val_batch_transforms: list[dict[str, Any]] | None = key(
        None,
        "Evaluation uses these in place of `batch_transforms`. Null means those of training that "
        "are not marked as random; one that is random is refused.",
    )
    threads: int = key(
        1,
        "This many threads of each rank read ahead. With 0 a batch is read when training needs it. "
        "This does the same work, but each step waits for it: it is slower, and for debugging.",
        at_least=0,
        identity=False,
    )
    prefetch_mb: float = key(
        64.0, "Each rank reads ahead up to this amount.", unit="MB", at_least=0, identity=False
    )
    workers: int = key(
        0,
        "This many processes of each rank apply `transforms`. With 0 the reading threads do.",
        at_least=0,
        identity=False,
    )
    stage: str = key(
        "auto",
        "Shards are copied to the node's own disk: never (none), always (node), from network file "
        "systems and URLs (auto).",
        choices=("none", "node", "auto"),
        identity=False,
    )
    stage_dir: str | None = key(
        None,
        "Copies of shards are written into this folder, which is made if it does not exist. Null "
        "means SLURM_TMPDIR, TMPDIR, /tmp or /dev/shm.",
        identity=False,
    )
    verify: str = key(
        "off",
        "Shards are compared with their digests: never (off), or when they are opened (first_use).",
        choices=("off", "first_use"),
        identity=False,
    )

    @property
    def fold_of(self) -> tuple[int, int] | None:
        """The number K of the fold and the number N of folds that `fold` names."""
        if self.fold is None:
            return None
        number, _, folds = self.fold.partition("/")
        return int(number), int(folds)

    @property
    def evaluated(self) -> str | None:
        """The name of what the metrics val/NAME are of: a split, or a fold; None: there is none."""
        if self.fold is None:
            return self.val_split
        return f"{self.train_split}-fold-{self.fold.replace('/', '-of-')}"

    @property
    def other_sets(self) -> dict[str, tuple[str, str]]:
        """The path and the split of each evaluation other than that of val_split, by its name."""
        return {
            one["name"]: (one.get("path", self.path), str(one.get("split", self.val_split)))
            for one in self.val_sets
        }

    @property
    def paths(self) -> list[str]:
        """The paths and URLs of all data sets that are named, that of `path` first."""
        parts = (*self.mixture, *self.val_sets)
        return [self.path, *(part["path"] for part in parts if "path" in part)]
