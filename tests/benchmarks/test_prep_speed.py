"""Compares data_prep with other writers, `cp` and `datasets.map`, on the same source in one run.

python -m pytest tests/benchmarks/test_prep_speed.py --benchmark-only
HPCTRAIN_PREP=full python -m pytest tests/benchmarks/test_prep_speed.py --benchmark-only

The first run installs webdataset, mosaicml-streaming and litdata, as test_loaders.py does. Each
program is timed as a whole process, until its files are on the disk. The other programs also
measure the time from the end of their imports until they return. All programs run in turn in every
round, and the best round counts. Times are printed and never asserted; the memory is asserted.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from PIL import Image
from pytest_benchmark.fixture import BenchmarkFixture

from hpctrain.disk import sync
from hpctrain.shards.index import Index
from tests.benchmarks.loaders.environments import python_with
from tests.benchmarks.prep.writers import WRITERS
from tests.conftest import ROOT

FULL = os.environ.get("HPCTRAIN_PREP") == "full"
ROUNDS = 3 if FULL else 2
IMAGES = 20_000 if FULL else 2_000
ARRAY_MB = 4_000 if FULL else 1_000
MEMORY_MB = (1_000, 8_000) if FULL else (250, 1_000)
OURS = [sys.executable, "-m", "data_prep"]


def other(name: str, src: Path, out: Path) -> dict[str, float]:
    """Return the seconds of another writer, as a process and by its own clock."""
    package, _ = WRITERS[name]
    command = [python_with(package), "-m", "tests.benchmarks.prep.writers", name, src, out]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(out),
    }
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=out, env=environment
    )
    assert not done.returncode, done.stderr[-2000:]
    for path in out.rglob("*"):
        if path.is_file():
            sync(path)
    took = time.perf_counter() - start
    return {name: took, f"{name}, by its own clock": float(done.stdout.splitlines()[-1])}


def ours(name: str, out: Path, *command: object) -> dict[str, float]:
    """Return the seconds of a data_prep command that writes into OUT."""
    words = [*OURS, *map(str, command), "--quiet"]
    start = time.perf_counter()
    subprocess.run(words, check=True, cwd=ROOT)
    took = time.perf_counter() - start
    assert Index.load(out).shards
    return {name: took}


def rounds(work: Path, *runs: Callable[[Path], dict[str, float]]) -> dict[str, list[float]]:
    """Run all in turn, each into a new folder; every round begins with a different one."""
    seconds: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for run in runs[number % len(runs) :] + runs[: number % len(runs)]:
            out = work / "out"
            out.mkdir()
            os.sync()  # otherwise a program would wait for the writes of another
            for name, took in run(out).items():
                seconds.setdefault(name, []).append(took)
            shutil.rmtree(out)
    return seconds


def table(title: str, unit: str, amount: float, seconds: dict[str, list[float]]) -> str:
    lines = [f"{title}: the best round, and data_prep over it (of medians)"]
    ours = seconds["data_prep"]
    for name, took in sorted(seconds.items()):
        best, middle = min(took) / min(ours), median(took) / median(ours)
        rate = amount / min(took)
        lines.append(f"  {name:40} {rate:>12,.0f} {unit}  {best:6.2f} x ({middle:.2f})")
    return "\n".join(lines)


@pytest.fixture
def say(capsys):
    found = Path(".benchmarks", "prep.json")

    def show(title, unit, amount, seconds):
        with capsys.disabled():
            print("\n" + table(title, unit, amount, seconds))
        found.parent.mkdir(exist_ok=True)
        content = json.loads(found.read_text()) if found.exists() else {}
        found.write_text(json.dumps(content | {title: seconds}, indent=1))

    return show


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of JPEG files of 256 x 256 in ten classes, with details as in photographs."""
    from sklearn.datasets import load_sample_images

    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    scenes = load_sample_images().images
    for i in range(IMAGES):
        scene = scenes[i % len(scenes)]
        y, x = rng.integers(0, scene.shape[0] - 256), rng.integers(0, scene.shape[1] - 256)
        path = folder / f"class-{i % 10}" / f"{i:06d}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(scene[y : y + 256, x : x + 256]).save(path, quality=90)
    return folder


@pytest.mark.timeout(3600)
def test_images(benchmark: BenchmarkFixture, tmp_path: Path, photos: Path, say) -> None:
    """Compare decoded images with other writers, and encoded images with decoding alone."""
    options = {
        "data_prep": ("--shard-size", "64MiB"),
        "data_prep, one worker": ("--shard-size", "64MiB", "--workers", 1),
        "data_prep, encoded, one worker": ("--encoded", "--workers", 1),
    }
    runs = [
        *(
            lambda out, name=name, more=more: ours(name, out, "images", photos, out, *more)
            for name, more in options.items()
        ),
        *(
            lambda out, name=name: other(name, photos, out)
            for name in ("decode alone", "webdataset", "mosaicml-streaming", "litdata")
        ),
    ]
    seconds = benchmark.pedantic(rounds, args=(tmp_path, *runs), rounds=1)
    say("images, JPEG 256 x 256", "images/s", IMAGES, seconds)


@pytest.mark.timeout(3600)
def test_text(benchmark: BenchmarkFixture, tmp_path: Path, say) -> None:
    """Write tokens of the standard library's source, with a BPE of 8,192 trained on it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(errors="replace") for path in paths] * (8 if FULL else 2)
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        texts[: len(paths)], trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"])
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count = sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts))
    runs = [
        lambda out: ours(
            *("data_prep", out, "text", source, out, "--shard-size", "4MiB"),
            *("--tokenizer", tmp_path / "tokenizer.json"),
        ),
        lambda out: other("datasets.map", source, out),
    ]
    seconds = benchmark.pedantic(rounds, args=(tmp_path, *runs), rounds=1)
    say("text, BPE 8,192", "tokens/s", count, seconds)


def random_array(path: Path, megabytes: int) -> Path:
    array = np.lib.format.open_memmap(path, "w+", np.float32, (megabytes, 250_000))
    rng = np.random.default_rng(0)
    for row in array:
        row[:] = rng.random(row.shape, np.float32)
    array.flush()
    return path


@pytest.mark.timeout(3600)
def test_arrays(benchmark: BenchmarkFixture, tmp_path: Path, say) -> None:
    """Compare writing a float32 array with copying its file, both until the data is on the disk."""
    source = random_array(tmp_path / "x.npy", ARRAY_MB)
    one = "data_prep, one worker"
    runs = [
        lambda out: ours("data_prep", out, "arrays", source, out),
        lambda out: ours(one, out, "arrays", source, out, "--workers", 1),
        lambda out: other("cp", source, out),
    ]
    seconds = benchmark.pedantic(rounds, args=(tmp_path, *runs), rounds=1)
    say("arrays, float32", "MB/s", ARRAY_MB, seconds)


@pytest.mark.timeout(3600)
def test_memory_is_flat(benchmark: BenchmarkFixture, tmp_path: Path, capsys) -> None:
    def measure() -> list[float]:
        peaks = []
        for megabytes in MEMORY_MB:
            source = random_array(tmp_path / f"{megabytes}.npy", megabytes)
            command = f"""
import sys
from data_prep.cli import main
code = main(["arrays", "--field", "x={source}", "{tmp_path}/out", "--workers", "1", "--quiet"])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
sys.exit(code)
"""
            done = subprocess.run(
                [sys.executable, "-c", command], capture_output=True, text=True, check=True
            )
            peaks.append(int(done.stdout) / 1e3)
            shutil.rmtree(tmp_path / "out")
            source.unlink()
        return peaks

    small, large = benchmark.pedantic(measure, rounds=1)
    with capsys.disabled():
        print(
            f"\npeak memory: {MEMORY_MB[0]} MB of input {small:,.0f} MB, "
            f"{MEMORY_MB[1]} MB of input {large:,.0f} MB"
        )
    assert large < 1.2 * small
