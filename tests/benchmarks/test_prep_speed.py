"""data_prep beside the writers of others, `cp` and `datasets.map`, on the same source in one run.

python -m pytest tests/benchmarks/test_prep_speed.py --benchmark-only
HPCTRAIN_PREP=full python -m pytest tests/benchmarks/test_prep_speed.py --benchmark-only

The first run installs webdataset, mosaicml-streaming and litdata, as test_loaders.py does. Ours is
timed as a whole process, Python's start included; the others from after their imports. Each runs
in turn in every round, the best round counts. Times are reported, never asserted; memory is.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pytest_benchmark.fixture import BenchmarkFixture

from hpctrain.data.index import Index
from tests.benchmarks.loaders.environments import python_with
from tests.benchmarks.prep.writers import WRITERS
from tests.conftest import ROOT

FULL = os.environ.get("HPCTRAIN_PREP") == "full"
ROUNDS = 3 if FULL else 2
IMAGES = 20_000 if FULL else 2_000
ARRAY_MB = 4_000 if FULL else 1_000
MEMORY_MB = (1_000, 8_000) if FULL else (250, 1_000)
OURS = [sys.executable, "-m", "data_prep"]


def other(name: str, src: Path, out: Path) -> float:
    """Seconds of a writer."""
    package, _ = WRITERS[name]
    command = [python_with(package), "-m", "tests.benchmarks.prep.writers", name, src, out]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(out),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=out, env=environment
    )
    assert not done.returncode, done.stderr[-2000:]
    return float(done.stdout.splitlines()[-1])


def ours(out: Path, *command: object) -> float:
    """Seconds of a data_prep command that writes into OUT."""
    words = [*OURS, *map(str, command), "--quiet"]
    start = time.perf_counter()
    subprocess.run(words, check=True, cwd=ROOT)
    took = time.perf_counter() - start
    assert Index.load(out).shards
    return took


def rounds(work: Path, runs: dict[str, object]) -> dict[str, list[float]]:
    """Each in turn, into a fresh folder."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            out = work / "out"
            out.mkdir()
            os.sync()  # nobody waits for what another has written
            seconds[name].append(run(out))
            shutil.rmtree(out)
    return seconds


def table(title: str, unit: str, amount: float, seconds: dict[str, list[float]]) -> str:
    lines = [title]
    best = {name: amount / min(took) for name, took in seconds.items()}
    for name, rate in best.items():
        lines.append(f"  {name:40} {rate:>12,.0f} {unit}  {best['data_prep'] / rate:6.2f} x")
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
    """JPEG files of 256 x 256 in ten classes, with the detail of photographs."""
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
    """The decoded ones against other writers, the encoded ones against the decoding."""
    runs = {
        "data_prep": lambda out: ours(out, "images", photos, out, "--shard-size", "64MiB"),
        "data_prep, one worker": lambda out: ours(
            out, "images", photos, out, "--shard-size", "64MiB", "--workers", 1
        ),
        "data_prep, encoded, one worker": lambda out: ours(
            out, "images", photos, out, "--encoded", "--workers", 1
        ),
        **{
            name: lambda out, name=name: other(name, photos, out)
            for name in ("decode alone", "webdataset", "mosaicml-streaming", "litdata")
        },
    }
    seconds = benchmark.pedantic(rounds, args=(tmp_path, runs), rounds=1)
    say("images, JPEG 256 x 256", "images/s", IMAGES, seconds)


@pytest.mark.timeout(3600)
def test_text(benchmark: BenchmarkFixture, tmp_path: Path, say) -> None:
    """Tokens of the standard library's source, with a BPE of 8,192 trained on it."""
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
    runs = {
        "data_prep": lambda out: ours(
            *(out, "text", source, out, "--shard-size", "4MiB"),
            *("--tokenizer", tmp_path / "tokenizer.json"),
        ),
        "datasets.map": lambda out: other("datasets.map", source, out),
    }
    seconds = benchmark.pedantic(rounds, args=(tmp_path, runs), rounds=1)
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
    """A float32 array against a copy of its bytes, both on the disk in the end."""
    source = random_array(tmp_path / "x.npy", ARRAY_MB)
    runs = {
        "data_prep": lambda out: ours(out, "arrays", source, out),
        "data_prep, one worker": lambda out: ours(out, "arrays", source, out, "--workers", 1),
        "cp": lambda out: other("cp", source, out),
    }
    seconds = benchmark.pedantic(rounds, args=(tmp_path, runs), rounds=1)
    say("arrays, float32", "MB/s", ARRAY_MB, seconds)


@pytest.mark.timeout(3600)
def test_memory_is_flat(benchmark: BenchmarkFixture, tmp_path: Path, capsys) -> None:
    """The peak does not grow with the input."""

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
