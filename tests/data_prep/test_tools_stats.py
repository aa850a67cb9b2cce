"""`data_prep stats` prints and plots the statistics of the fields."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from data_prep.datasets.dataset import DataSet, evenly
from data_prep.show import page
from data_prep.show.console import size
from hpctrain.shards.format import write_shards
from hpctrain.terminal import printable

NAMES = ["cat [bold]", "dog\n$x_1$", "<b>bird</b>", "猫"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of a data set with all kinds of fields and odd names of categories."""
    rng = np.random.default_rng(0)

    def batch(n):
        jpeg = io.BytesIO()
        Image.new("RGB", (9, 7), (200, 30, 60)).save(jpeg, "JPEG")
        noisy = rng.normal(size=(n, 3, 6, 8)).astype(np.float32)
        noisy[0, 0, 0, :2] = np.nan, np.inf
        return {
            "image": rng.integers(0, 256, (n, 3, 10, 12), np.uint8),
            "grey": rng.integers(0, 9, (n, 6, 8), np.uint8),
            "file": [np.frombuffer(jpeg.getvalue(), np.uint8)] * n,
            "flow": noisy,
            "warm": 270 + rng.random((n, 5, 5)),
            "signal": rng.normal(size=(n, 30)),
            "label": rng.integers(0, 4, n),
            "many": rng.integers(0, 100, n),
            "id": np.arange(n) * 10_000,
            "mass": rng.lognormal(size=n),
            "constant": np.full(n, 2.5, np.float16),
            "nothing": np.full(n, np.nan),
            "huge": np.array([-1e308, 1e308] * n)[:n],
            "text": [np.frombuffer(b"words " * int(k), np.uint8) for k in rng.integers(0, 900, n)],
        }

    write_shards(tmp_path / "set", [("train", batch(60)), ("val", batch(2))], max_bytes=20_000)
    monkeypatch.setattr(DataSet, "categories", lambda _, name: NAMES if name == "label" else [])
    return tmp_path / "set"


def test_the_table(folder, data_prep):
    code, out, err = data_prep("stats", folder)
    assert (code, err) == (0, "")
    assert "train: 60 samples" in out
    assert "val: 2 samples" in out
    flow = next(line.split() for line in out.splitlines() if line.startswith("flow"))
    assert flow[0:4] == ["flow", "float32[3,", "6,", "8]"]
    assert "cat [bold]" in out
    assert "dog\\n$x_1$" in out
    assert "label: 4 values" in out


def test_as_json(folder, data_prep):
    code, out, _ = data_prep("stats", folder, "--json", "--split", "train")
    found = {summary["name"]: summary for summary in json.loads(out)}
    assert code == 0
    data = DataSet(folder)
    train = data.index.split("train")
    labels = np.concatenate([rows["label"] for rows in data.blocks(train, data.fields(["label"]))])
    assert [(c["value"], c["name"], c["count"]) for c in found["label"]["classes"]] == [
        (value, NAMES[value], int((labels == value).sum())) for value in range(4)
    ]
    assert found["flow"]["nonfinite"] == 2
    assert found["mass"]["classes"] is None
    texts = np.concatenate([r["text"].lengths for r in data.blocks(train, data.fields(["text"]))])
    lengths = found["text"]["lengths"]
    assert (lengths["min"], lengths["max"]) == (texts.min(), texts.max())
    assert lengths["mean"] == pytest.approx(texts.mean())
    assert lengths["total"] == texts.sum()


def test_plots_are_the_same_each_time(folder, tmp_path, data_prep):
    files = [tmp_path / f"{name}.png" for name in "ab"]
    fields = [f"--field={name}" for name in ("flow", "label")]
    for file in files:
        code, out, err = data_prep("stats", folder, "--plot", file, *fields)
        assert (code, err) == (0, "")
        assert out.endswith(f"{file}\n")
    assert files[0].read_bytes() == files[1].read_bytes()
    with Image.open(files[0]) as image:
        assert image.width == 1650
        colours = image.convert("RGB").getcolors(2**24)
    assert len(colours) > 100  # not a blank page


@pytest.mark.slow
def test_every_kind_of_field_is_drawn(folder, tmp_path, data_prep):
    assert data_prep("stats", folder, "--plot", tmp_path / "a.png")[0] == 0


def test_fields_and_splits_can_be_chosen(folder, tmp_path, data_prep):
    code, out, _ = data_prep("stats", folder, "--split", "val", "-f", "mass", "-f", "label")
    assert code == 0
    assert "train" not in out
    assert "flow" not in out
    plot = tmp_path / "mass.png"
    assert data_prep("stats", folder, "-f", "mass", "--plot", plot)[0] == 0
    data_prep.refuses(2, "there are train, val", "stats", folder, "--split", "test")
    data_prep.refuses(2, "--field 'nix': there are image, grey", "stats", folder, "-f", "nix")


def test_plots_that_cannot_be(folder, tmp_path, data_prep):
    code, out, err = data_prep("stats", folder, "--plot", tmp_path / "a.jpg")
    assert (code, out) == (2, "")
    assert "it is a .png file" in err
    code, _, err = data_prep("stats", folder, "--plot", tmp_path / "no" / "a.png", "-f", "mass")
    assert (code, f"there is no folder {tmp_path}/no" in err) == (2, True)
    (tmp_path / "a.png").mkdir()
    code, _, err = data_prep("stats", folder, "--plot", tmp_path / "a.png", "-f", "mass")
    assert (code, "cannot write" in err) == (6, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "set"]


def test_a_picture_has_an_end(tmp_path, data_prep):
    batch = {f"x{i:03d}": np.zeros(1) for i in range(200)}
    write_shards(tmp_path / "set", [("train", batch)])
    code, _, err = data_prep("stats", tmp_path / "set", "--plot", tmp_path / "a.png")
    assert (code, "200 fields are too many for one picture" in err) == (2, True)


def test_only_samples_that_are_drawn_are_read(folder, monkeypatch):
    from data_prep.datasets import shards
    from data_prep.show import views

    read = []
    real = shards.OpenShard.rows
    monkeypatch.setattr(
        shards.OpenShard,
        "rows",
        lambda self, name, a, b: read.append((name, b - a)) or real(self, name, a, b),
    )
    monkeypatch.setattr(views, "SAMPLES", 10)
    monkeypatch.setattr(views, "SHOWN", 4)
    data = DataSet(folder)
    from data_prep.tools.stats import summarise

    splits = data.splits("train")
    summaries = [summarise(data, splits[0], "flow")]
    list(page.views(data, splits, summaries))
    assert 0 < sum(count for name, count in read if name == "flow") <= 14


def test_evenly():
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(101, 3) == [0, 50, 100]
    assert evenly(10, 1) == [0]
    for count in range(1, 60):
        found = evenly(count, 24)
        assert found == sorted(set(found))
        assert len(found) == min(count, 24)


def test_words():
    assert printable("a\x1b[31m\udcff") == "a\\x1b[31m\\udcff"
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 10**18)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "2.5 MB", "1000.0 PB")
    ]
