import os
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.data.dataset import HDF5Dataset
from hpctrain.errors import DataError
from hpctrain.shards.format import write_shards
from tests import forkserver

COUNT = 23
ARRAYS = {
    "image": np.random.default_rng(0).integers(0, 255, (COUNT, 2, 3), dtype=np.uint8),
    "label": np.arange(COUNT),
    "short": np.arange(COUNT, dtype=np.uint16) + 60_000,
    "text": [np.arange(i % 4, dtype=np.uint16) + 60_000 for i in range(COUNT)],
}
# torch's DataLoader forks a process that has threads; from Python 3.12 on this gives a warning.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    write_shards(folder, [("train", ARRAYS)], max_bytes=300)
    return folder


def test_a_sample(folder):
    dataset = HDF5Dataset(folder, "train")
    assert len(dataset) == COUNT
    for i, sample in enumerate(dataset):
        assert {name: tensor.dtype for name, tensor in sample.items()} == {
            "image": torch.uint8,
            "label": torch.int64,
            "short": torch.int32,
            "text": torch.int32,
        }
        assert sample["image"].tolist() == ARRAYS["image"][i].tolist()
        assert sample["label"].item() == i
        assert sample["short"].item() == 60_000 + i
        assert sample["text"].tolist() == ARRAYS["text"][i].tolist()
    assert i == COUNT - 1
    with pytest.raises(IndexError):
        dataset[COUNT]
    assert list(HDF5Dataset(folder, "train", ["label"])[3]) == ["label"]
    with pytest.raises(DataError, match="no split 'test'"):
        HDF5Dataset(folder, "test")


def test_samples_read_together(folder):
    samples = HDF5Dataset(folder, "train").__getitems__([4, 0, 4])
    assert [sample["label"].item() for sample in samples] == [4, 0, 4]
    with pytest.raises(IndexError, match="sample 3 of 3"):
        samples[3]
    batch = HDF5Dataset.collate(samples)
    assert batch["text_length"].tolist() == [0, 0, 0]
    assert (batch["image"].numpy() == ARRAYS["image"][[4, 0, 4]]).all()


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_in_torchs_data_loader(folder, workers):
    dataset = HDF5Dataset(folder, "train")
    dataset[0]  # opens a shard, which no worker may inherit
    loader = DataLoader(
        dataset, batch_size=5, shuffle=True, num_workers=workers, collate_fn=dataset.collate
    )
    for _ in range(2):
        found = []
        for batch in loader:
            labels = batch["label"].tolist()
            found += labels
            assert (batch["image"].numpy() == ARRAYS["image"][labels]).all()
            assert batch["text_length"].tolist() == [i % 4 for i in labels]
            assert batch["text"].shape == (len(labels), max(i % 4 for i in labels))
        assert sorted(found) == list(range(COUNT))


# Other frameworks on real digits, used as the docstring of hpctrain.data.dataset shows.


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["image"].float() / 16), batch["label"])


ACCELERATE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from test_dataset import loss_of, net
from hpctrain.data.dataset import HDF5Dataset

def main():
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = HDF5Dataset(sys.argv[1], "train")
    loader = DataLoader(dataset, batch_size=32, shuffle=True, collate_fn=dataset.collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], 0
    for epoch in range(5):
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen += len(batch["label"])
    seen = accelerator.reduce(torch.tensor(seen)).item()
    if accelerator.is_main_process:
        print(losses[0], losses[-1], seen, len(dataset), accelerator.num_processes)
    accelerator.wait_for_everyone()
    # DDP's model must end before its process group: see hpctrain/job/fit.py.
    del model, optimizer, loader
    accelerator.free_memory()
    accelerator.end_training()

main()
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accelerate(digits, tmp_path, processes):
    script = tmp_path / "training.py"
    script.write_text(ACCELERATE)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = forkserver.run(
        [sys.executable, *(launch if processes > 1 else []), "-m", script.stem, str(digits)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == 0, done.stderr
    first, last, seen, count, found = map(float, done.stdout.split())
    assert last < first / 2
    assert 5 * count <= seen < 5 * (count + 64)  # the last batch is filled up
    assert found == processes
