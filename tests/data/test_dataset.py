import io
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.data.dataset import HDF5Dataset, LoaderDataset
from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.order import Order
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError
from tests.written import write_shards

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


# LoaderDataset: hpctrain's loader, whose iterations are epochs.


def ours(folder, **options):
    options = {"global_batch_size": 4, "tail": "pad", "seed": 3} | options
    return LoaderDataset(Loader(Reader(folder, "train", ["label"]), **options))


def labels(batches):
    return [batch["label"][batch["mask"]].tolist() for batch in batches]


def joined(batches):
    return list(chain.from_iterable(labels(batches)))


def orders(*epochs):
    order = Order(COUNT, 3)
    return [order(epoch, np.arange(COUNT)).tolist() for epoch in epochs]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: DataLoader(x, batch_size=None)])
def test_each_iteration_is_an_epoch(folder, wrap):
    loader = wrap(ours(folder))
    assert len(loader) == 6
    epochs = [joined(loader) for _ in range(3)]
    assert epochs == orders(0, 1, 2)


def test_an_epoch_that_is_broken_off(folder):
    dataset = ours(folder)
    for _ in dataset:
        break
    assert dataset.state_dict() == {"consumed": 4}
    assert joined(dataset) == orders(1)[0]
    iter(dataset)  # an iterator that is never used begins no epoch
    assert joined(dataset) == orders(2)[0]


@pytest.mark.parametrize("done", range(0, 20, 3))
def test_it_resumes_within_an_epoch(folder, done):
    def steps(dataset, count):
        found = []
        while len(found) < count:
            for batch in DataLoader(dataset, batch_size=None):
                found += labels([batch])
                if len(found) == count:
                    break
        return found

    whole = steps(ours(folder), 24)
    first, second = ours(folder), ours(folder)
    assert steps(first, done) == whole[:done]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert steps(second, 24 - done) == whole[done:]


def test_evaluation_by_epochs(folder):
    dataset = ours(folder, shuffle=False)
    for _ in dataset:  # Lightning's sanity check does this
        break
    for _ in range(3):
        assert joined(dataset) == list(range(COUNT))


@forks
def test_worker_processes_are_refused(folder):
    with pytest.raises(ConfigError, match=r"needs DataLoader\(num_workers=0\)"):
        next(iter(DataLoader(ours(folder), batch_size=None, num_workers=1)))


# Other frameworks on real digits, used as the docstring of hpctrain.data.dataset shows.


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["image"].float() / 16), batch["label"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning and its dependencies give many warnings
def test_lightning_continues_in_the_middle_of_an_epoch(digits, tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen, self.validated = net(), [], 0

        def training_step(self, batch, step):
            self.seen.append(batch["label"].tolist())
            return loss_of(self.net, batch)

        def validation_step(self, batch, step):
            self.validated += int(batch["mask"].sum())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps, **options):
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        training = Loader(Reader(digits, "train"), global_batch_size=64)
        evaluation = Loader(Reader(digits, "val"), global_batch_size=64, shuffle=False, tail="pad")
        loaders = LoaderDataset(training), LoaderDataset(evaluation)
        trainer.fit(module, *loaders, **options)
        return trainer, module, len(loaders[0])

    _, whole, epoch = fit(50)
    done = epoch + 7
    trainer, first, _ = fit(done)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, second, _ = fit(50, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert first.seen == whole.seen[:done]
    assert second.seen == whole.seen[done:]
    for one, other in zip(second.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.validated >= len(Reader(digits, "val"))
