import gc
import sys
import threading
from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.loading import prefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.loading.steps import Steps
from hpctrain.data.samplers.order import Order
from hpctrain.data.shards.field import Field
from hpctrain.data.source import Source
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError
from tests import forkserver
from tests.written import write_shards


class Numbers(Source):
    """A source of `count` samples whose field x is their index.

    It counts its reads. A read that includes the sample `fail_at` raises a DataError.
    """

    def __init__(self, count, fail_at=None):
        self.count, self.fail_at = count, fail_at
        self.fields = {"x": Field("int64")}
        self.reads = 0

    def __len__(self):
        return self.count

    def read(self, indices, out=None):
        self.reads += 1
        if self.fail_at in indices:
            raise DataError("shard s.h5 is gone")
        out["x"][:] = indices
        return out


@pytest.fixture
def one_by_one(monkeypatch):
    """Make the loader read one step at a time."""
    monkeypatch.setattr(prefetcher, "MAX_STEPS", 1)


def joined(lists):
    return list(chain.from_iterable(lists))


@pytest.fixture(autouse=True)
def no_threads_of_other_tests():
    """Collect the iterators in reference cycles, such as Lightning's, which keep their threads."""
    gc.collect()


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("hpctrain-loader")]


def left():
    """Return the threads of loaders that do not end; an iterator that ends waits for none."""
    for thread in threads():
        thread.join(60)
    return threads()


def take(loader, steps):
    """Return the samples of each of the next `steps` batches, without padding."""
    batches = []
    iterator = iter(loader)
    for _ in range(steps):
        batch = next(iterator)
        batches.append(batch["x"][batch["mask"]].tolist())
    iterator.close()
    return batches


def global_batches(count, batch_size, dp_size, **options):
    """Return the samples and the mask of each step, joined over all ranks in order."""
    ranks = [
        list(
            Loader(
                Numbers(count), global_batch_size=batch_size, dp_rank=r, dp_size=dp_size, **options
            )
        )
        for r in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    return [
        (torch.cat([b["x"] for b in step]).tolist(), torch.cat([b["mask"] for b in step]).tolist())
        for step in zip(*ranks, strict=True)
    ]


shapes = st.fixed_dictionaries(
    {
        "count": st.integers(1, 60),
        "per_rank": st.integers(1, 6),
        "dp_size": st.integers(1, 6),
        "tail": st.sampled_from(["drop", "pad"]),
        "shuffle": st.booleans(),
        "threads": st.integers(0, 3),
    }
)


def unpack(shape):
    shape = dict(shape)
    count, dp_size = shape.pop("count"), shape.pop("dp_size")
    batch_size = shape.pop("per_rank") * dp_size
    if shape["tail"] == "drop":
        count = max(count, batch_size)
    return count, batch_size, dp_size, shape


@settings(max_examples=30, deadline=None)
@given(shape=shapes, epochs=st.integers(0, 3))
def test_the_global_batch_is_the_same_for_every_number_of_ranks(shape, epochs):
    count, batch_size, dp_size, options = unpack(shape)
    options |= {"max_epochs": epochs, "seed": 3}
    steps = global_batches(count, batch_size, dp_size, **options)
    assert steps == global_batches(count, batch_size, 1, **options)
    loader = Loader(Numbers(count), global_batch_size=batch_size, **options)
    assert len(steps) == epochs * loader.steps_per_epoch
    for epoch in range(epochs):
        own = steps[epoch * loader.steps_per_epoch : (epoch + 1) * loader.steps_per_epoch]
        real = [x for batch, mask in own for x, m in zip(batch, mask, strict=True) if m]
        order = Order(count, 3, options["shuffle"])(epoch, np.arange(count)).tolist()
        kept = count if options["tail"] == "pad" else count // batch_size * batch_size
        assert real == order[:kept]  # no sample comes twice, and only the tail is missing
        assert all(len(batch) == batch_size for batch, _ in own)


stages = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=3)


@settings(max_examples=50, deadline=None)
@given(shape=shapes, stages=stages, epochs=st.integers(1, 3), done=st.integers(0, 30))
def test_a_ramp_gives_the_same_order_in_batches_that_grow(shape, stages, epochs, done):
    """Sizes per rank of the stages are added up, so each batch is larger than the one before."""
    count, _, dp_size, options = unpack(shape)
    sizes = [sum(n for n, _ in stages[: i + 1]) * dp_size for i in range(len(stages))]
    batch_size = (sizes[-1] if sizes else 0) + dp_size
    count = max(count, batch_size) if options["tail"] == "drop" else count
    ramp = list(zip(sizes, (steps for _, steps in stages), strict=True))
    options |= {"max_epochs": epochs, "seed": 3, "ramp": ramp}
    found = global_batches(count, batch_size, dp_size, **options)
    assert found == global_batches(count, batch_size, 1, **options)
    loader = Loader(Numbers(count), global_batch_size=batch_size, **options)
    assert len(found) == loader.steps.steps_in(epochs)
    expected = [size for size, steps in ramp for _ in range(steps)]
    given = [len(batch) for batch, _ in found]
    assert given == [*expected, *[batch_size] * len(found)][: len(found)]
    real = [[x for x, m in zip(*step, strict=True) if m] for step in found]
    order = [
        Order(count, 3, options["shuffle"])(epoch, np.arange(count)).tolist()
        for epoch in range(epochs)
    ]
    if options["tail"] == "pad":
        assert joined(real) == joined(order)
    else:  # at the end of an epoch, less than the batch whose turn it is may be left out
        left = joined(order)
        for batch in real:
            size = len(batch)
            gap = next(gap for gap in range(size) if left[gap : gap + size] == batch)
            left = left[gap + len(batch) :]
    first = Loader(Numbers(count), global_batch_size=batch_size, **options)
    done = min(done, len(found))
    assert take(first, done) == real[:done]
    resumed = Loader(Numbers(count), global_batch_size=batch_size, **options)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, len(found) - done) == real[done:]


@settings(max_examples=40, deadline=None)
@given(shape=shapes, done=st.integers(0, 25), later=st.integers(1, 5), later_dp=st.integers(1, 4))
def test_a_resume_continues_the_sequence(shape, done, later, later_dp):
    """The number of ranks and the batch size may change."""
    count, batch_size, _, options = unpack(shape)
    first = Loader(Numbers(count), global_batch_size=batch_size, seed=1, **options)
    before = take(first, done)
    state = first.state_dict()
    assert list(state) == ["consumed"]

    new_size = later * later_dp
    if options["tail"] == "drop" and new_size > count:
        new_size, later_dp = 1, 1
    ranks = []
    for rank in range(later_dp):
        loader = Loader(
            Numbers(count),
            global_batch_size=new_size,
            dp_rank=rank,
            dp_size=later_dp,
            seed=1,
            max_epochs=state["consumed"] // count + 2,
            **options,
        )
        loader.load_state_dict(state)
        ranks.append([batch["x"][batch["mask"]].tolist() for batch in loader])
    after = [joined(step) for step in zip(*ranks, strict=True)]

    epoch, offset = divmod(state["consumed"], count)
    order = Order(count, 1, options["shuffle"])
    this = order(epoch, np.arange(offset, count)).tolist()
    following = order(epoch + 1, np.arange(count)).tolist()
    drop = options["tail"] == "drop"
    kept = len(this) // new_size * new_size if drop else len(this)
    kept_next = count // new_size * new_size if drop else count
    assert joined(after) == this[:kept] + following[:kept_next]
    # Before the interruption, the epoch gave exactly the first part of its order.
    had = joined(before)[-offset:] if offset else []
    assert had == order(epoch, np.arange(offset)).tolist()


@pytest.mark.parametrize("threads", [0, 1, 7])
@pytest.mark.parametrize("steps", [1, 5, 64])
def test_the_state_counts_what_was_handed_out(threads, steps, monkeypatch):
    monkeypatch.setattr(prefetcher, "MAX_STEPS", steps)
    loader = Loader(Numbers(100), global_batch_size=8, threads=threads)
    whole = take(Loader(Numbers(100), global_batch_size=8), 30)
    for step, batch in enumerate(loader):
        assert batch["x"].tolist() == whole[step]
        epoch, inside = divmod(step, 12)
        assert loader.state_dict()["consumed"] == epoch * 100 + (
            8 * (inside + 1) if inside < 11 else 100
        )
        assert loader.epoch == epoch + (inside == 11)
        if step == 29:
            break
    resumed = Loader(Numbers(100), global_batch_size=8)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, 3) == take(loader, 3)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 50), per_rank=st.integers(1, 8), dp_size=st.integers(1, 5))
def test_evaluation_counts_each_sample_once(count, per_rank, dp_size):
    options = {"shuffle": False, "tail": "pad", "max_epochs": 1}
    steps = global_batches(count, per_rank * dp_size, dp_size, **options)
    real = [x for batch, mask in steps for x, m in zip(batch, mask, strict=True) if m]
    assert real == list(range(count))
    assert all(0 <= x < count for batch, _ in steps for x in batch)


def test_real_shards(tmp_path):
    count = 37
    samples = {
        "image": np.random.default_rng(0).integers(0, 255, (count, 2, 3), dtype=np.uint8),
        "short": np.arange(count, dtype=np.uint16) + 60_000,
        "word": np.arange(count, dtype=np.uint32) + 4_000_000_000,
        "half": np.arange(count, dtype=np.float16),
        "text": [np.full(i % 4, i, np.uint8) for i in range(count)],
    }
    write_shards(tmp_path, [("train", samples)], max_bytes=200)
    loader = Loader(Reader(tmp_path, "train"), global_batch_size=8, tail="pad", max_epochs=2)
    order = Order(count, 0)
    positions = 0
    for step, batch in enumerate(loader):
        assert set(batch) == {"mask", "image", "short", "word", "half", "text", "text_length"}
        assert batch["mask"].dtype == torch.bool
        types = [batch[name].dtype for name in ("image", "short", "word", "half", "text")]
        assert types == [torch.uint8, torch.int32, torch.int64, torch.float16, torch.uint8]
        real = int(batch["mask"].sum())
        epoch, start = divmod(step, 5)
        rows = order(epoch, np.arange(start * 8, start * 8 + real))
        positions += real
        for name in ("image", "short", "word", "half"):
            assert (batch[name][:real].numpy() == samples[name][rows]).all()
        assert batch["text_length"].tolist()[:real] == [i % 4 for i in rows]
        for text, length, i in zip(batch["text"], batch["text_length"], rows, strict=False):
            assert text[:length].tolist() == samples["text"][i].tolist()
            assert not text[length:].any()
        stored = []
        for path, row in loader.samples():
            with h5py.File(path) as file:
                stored.append(file["word"][row])
        assert stored == samples["word"][rows].tolist()
    assert positions == 2 * count


def test_samples_of_a_source_without_files():
    loader = Loader(Numbers(5), global_batch_size=4, tail="pad", shuffle=False, max_epochs=1)
    with pytest.raises(RuntimeError, match="has not handed out a batch yet"):
        loader.samples()
    found = [loader.samples() for _ in loader]
    assert found == [[("Numbers", i) for i in range(4)], [("Numbers", 4)]]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.usefixtures("one_by_one")
def test_an_exception_of_the_thread_comes_with_its_type(number):
    source = Numbers(100, fail_at=25)  # a sample of the third batch
    loader = Loader(source, global_batch_size=10, threads=number, shuffle=False)
    with pytest.raises(DataError, match=r"shard s\.h5 is gone"):
        for _ in loader:
            pass
    assert loader.state_dict()["consumed"] == 20  # the two batches before the error
    assert left() == []


def test_a_source_that_returns_too_few_rows():
    class Short(Numbers):
        def read(self, indices, out=None):
            return {"x": super().read(indices, out)["x"][:-1]}

    with pytest.raises(DataError, match="x: 9 rows for 1 batches of 10"):
        next(iter(Loader(Short(100), global_batch_size=10, threads=0)))


def test_the_thread_ends_with_the_iterator():
    loader = Loader(Numbers(100), global_batch_size=10)
    for _ in loader:
        break
    assert left() == []

    iterator = iter(loader)
    next(iterator)
    assert len(threads()) == 2  # the reader and the planner
    del iterator
    gc.collect()
    assert left() == []

    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert left() == []

    iter(loader)  # an iterator that is never used starts no thread
    assert left() == []
    list(Loader(Numbers(100), global_batch_size=10, max_epochs=3))
    assert left() == []


def test_python_ends_while_an_iterator_lives(tmp_path):
    """A fork of the tests' server joins threads as Python does."""
    code = (
        "\nimport torch\n"
        "import numpy as np, sys, time\n"
        "from hpctrain.data.shards.index import Field\n"
        "from hpctrain.data.loading.loader import Loader\n"
        "class Slow:\n"
        "    fields = {'x': Field('int64')}\n"
        "    def __len__(self): return 100\n"
        "    def read(self, i, out): time.sleep(0.05); return out\n"
        "it = iter(Loader(Slow(), global_batch_size=2, prefetch_bytes=4))\n"
        "next(it)\n"
        "sys.stdout.write('done')\n"
    )
    (tmp_path / "program.py").write_text(code)
    result = forkserver.run(
        [sys.executable, "-m", "program"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("done", "")


@pytest.mark.parametrize("other", [lambda x: x.load_state_dict({"consumed": 0}), lambda x: iter(x)])
@pytest.mark.parametrize("begun", [False, True])
def test_an_iterator_ends_when_the_loader_moves(other, begun):
    loader = Loader(Numbers(100), global_batch_size=10)
    iterator = iter(loader)
    if begun:
        next(iterator)
    other(loader)
    with pytest.raises(RuntimeError, match="this iterator of the loader has ended"):
        next(iterator)
    assert left() == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"global_batch_size": 7, "dp_size": 2}, ConfigError, "size 7 cannot be divided among 2"),
        ({"global_batch_size": 0}, ConfigError, "size 0 cannot be divided"),
        ({"global_batch_size": -4, "dp_size": 2}, ConfigError, "size -4 cannot be divided"),
        ({"global_batch_size": 4, "dp_rank": 2, "dp_size": 2}, ConfigError, "rank 2 of 2: it is 0"),
        ({"global_batch_size": 4, "dp_rank": -1}, ConfigError, "rank -1 of 1"),
        ({"global_batch_size": 11}, DataError, "size 11 is larger than the data set, 10 samples"),
    ],
)
def test_what_does_not_fit_together(options, error, words):
    with pytest.raises(error) as caught:
        Loader(Numbers(10), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("names", [["mask"], ["text", "text_length"]])
def test_names_that_the_loader_needs(names):
    reader = Numbers(10)
    reader.fields = {name: Field("uint8", variable=True) for name in names}
    with pytest.raises(DataError, match=f"needs the name '{names[-1]}' itself"):
        Loader(reader, global_batch_size=1)


@pytest.mark.parametrize("state", [{}, {"consumed": "7"}, {"consumed": 1.5}, {"consumed": -1}])
def test_a_state_that_is_none(state):
    loader = Loader(Numbers(10), global_batch_size=1)
    with pytest.raises(DataError, match="state of"):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"consumed": 0}


def test_ten_billion_samples_from_the_middle():
    count = 10**10
    loader = Loader(Numbers(count), global_batch_size=1024, dp_rank=1023, dp_size=1024)
    loader.load_state_dict({"consumed": 3 * count + count // 2})
    (batch,) = take(loader, 1)
    position = np.array([count // 2 + 1023])
    assert batch == Order(count, 0)(3, position).tolist()


@pytest.mark.parametrize("ramp", [(), ((2, 3),), ((1, 2), (2, 1)), ((2, 7),)])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_whether_a_batch_is_filled_up(tail, ramp):
    for count in range(4, 15):
        steps = Steps(count, 4, tail=tail, ramp=ramp)
        filled = []
        for stretch in steps.stretches(0):
            filled += [not mask.all() for mask in steps.positions(stretch)[1]]
            if len(filled) > 30:
                break
        assert [steps.fills_up(n) for n in range(1, 25)] == [any(filled[:n]) for n in range(1, 25)]
