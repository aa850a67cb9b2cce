"""`--part I/N` and `finalize` write the same bytes as one process, in any order and if repeated."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from data_prep.writing import commit
from data_prep.writing.commit import PARTIAL
from data_prep.writing.convert import convert
from data_prep.writing.finalize import finalize_parts
from data_prep.writing.job import Conversion
from hpctrain.data.shards.index import Index
from hpctrain.errors import DataError, StorageError
from tests import forkserver
from tests.data_prep.crash import content
from tests.data_prep.hand import Row, hand, options

COMMAND = [sys.executable, "-m", "data_prep"]
ROWS = [[Row(number * 10 + i, text="t" * i) for i in range(5)] for number in range(4)]


@pytest.fixture
def reference(tmp_path):
    convert(hand(*ROWS), tmp_path / "reference", options("train=0.7,val=0.3"))
    return content(tmp_path / "reference")


def part(out, i, n, **more):
    return convert(hand(*ROWS), out, options("train=0.7,val=0.3", part=(i, n), **more))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_any_number_of_parts_in_any_order(tmp_path, reference, parts):
    order = np.random.default_rng(parts).permutation(parts).tolist()
    for i in order:
        index = part(tmp_path / "OUT", i + 1, parts)
        assert index is None or parts > len(ROWS) or i == order[-1]
    assert index is not None
    assert content(tmp_path / "OUT") == reference


def test_a_missing_part_is_named_with_its_command(tmp_path, reference):
    out = tmp_path / "OUT"
    for i in (1, 4):
        part(out, i, 4)
    with pytest.raises(DataError) as caught:
        finalize_parts(out)
    assert str(caught.value) == (
        f"{out}: 2 of 4 pieces are missing: parts 2/4, 3/4 are not done; it --part 2/4"
    )
    part(out, 3, 4)
    part(out, 3, 4)  # again, as if Slurm had requeued the task
    with pytest.raises(DataError, match=r"1 of 4 .*: part 2/4 is not done; it --part 2/4$"):
        finalize_parts(out)
    index = part(out, 2, 4)
    assert content(out) == reference
    assert finalize_parts(out) == index  # finalize may run again
    assert part(out, 2, 4) == index  # a task that is repeated when everything is finished
    assert content(out) == reference
    with pytest.raises(DataError, match="nowhere holds no parts to put together"):
        finalize_parts(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_part_without_pieces_is_remembered(tmp_path, reference):
    """`finalize` names the command of a missing part, even if the first task had no pieces."""
    out = tmp_path / "OUT"
    assert part(out, 1, 9) is None
    with pytest.raises(DataError, match=r"4 of 4 pieces are missing: parts .*; it --part \d/9$"):
        finalize_parts(out)
    for i in range(1, 10):
        part(out, i, 9)
    assert content(out) == reference


def test_a_plain_command_goes_on_where_parts_were(tmp_path, reference):
    part(tmp_path / "OUT", 2, 3)
    convert(hand(*ROWS), tmp_path / "OUT", options("train=0.7,val=0.3"))
    assert content(tmp_path / "OUT") == reference


def test_parts_of_something_else_are_not_mixed(tmp_path):
    part(tmp_path / "OUT", 1, 2)
    for overwrite in (False, True):
        other = options("train=0.6,val=0.4", part=(2, 2), overwrite=overwrite)
        with pytest.raises(DataError, match="holds parts of another source or of other options"):
            convert(hand(*ROWS), tmp_path / "OUT", other)
    # Two jobs that start at the same moment do not see each other, but `finalize` detects it.
    with Conversion(tmp_path / "OUT") as job:
        assert job.load()
        first = job.pieces.folder / "pieces" / "00000" / "piece.json"
        first.write_text(first.read_text().replace(job.plan.fingerprint, "another"))
    with pytest.raises(DataError, match="00000 is of another source or of other options"):
        part(tmp_path / "OUT", 2, 2)


def test_the_last_one_puts_together_whoever_it_is(tmp_path, reference, capsys):
    """When two tasks have done their pieces, the last one to try gets the exclusive lock."""
    out = tmp_path / "OUT"
    part(out, 1, 2)
    other = commit.lock(out, shared=True)
    assert part(out, 2, 2, quiet=False) is None
    assert "all are there, and the last task at work puts them together" in capsys.readouterr().out
    commit.unlock(other)
    assert part(out, 1, 2) is not None  # the other task, which had not tried before
    assert content(out) == reference


def test_a_part_waits_for_one_that_puts_together(tmp_path, reference):
    out = tmp_path / "OUT"
    out.mkdir()
    script = (
        "import sys; from pathlib import Path; from data_prep.writing.commit import lock\n"
        "held = lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", script, out], subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    holder.stdout.readline()
    with pytest.raises(StorageError, match="another process is writing a data set into"):
        convert(hand(*ROWS), out, options("train=0.7,val=0.3"))
    threading.Timer(0.5, holder.stdin.close).start()
    assert part(out, 1, 1) is not None
    assert holder.wait() == 0
    holder.stdout.close()
    assert content(out) == reference


def test_all_parts_at_once_one_of_them_twice(tmp_path, data_prep):
    """Slurm may requeue a task whose first process still runs on another node."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(3000, 20)))
    words = ["arrays", tmp_path / "x.npy", tmp_path / "OUT", "--shard-size", "20KB"]
    words += ["--split", "train=0.8,val=0.2", "--workers", "1"]
    assert data_prep(*[tmp_path / "REF" if w == tmp_path / "OUT" else w for w in words])[0] == 0
    tasks = [
        forkserver.Popen(
            [*COMMAND, *words, "--part", which],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for which in ("1/3", "2/3", "3/3", "1/3")
    ]
    said = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0] * len(tasks), said
    assert content(tmp_path / "OUT") == content(tmp_path / "REF")
    index = Index.load(tmp_path / "OUT")
    assert "--part" not in index.provenance["command"]
    assert data_prep("finalize", tmp_path / "OUT")[0] == 0


def test_what_parts_cannot_do(tmp_path, data_prep):
    np.save(tmp_path / "y.npy", np.arange(10))
    words = ["arrays", tmp_path / "y.npy", tmp_path / "OUT"]
    for wrong in ("0/2", "3/2", "1", "a/b", "-1/2", "1/0"):
        code, _, err = data_prep(*words, f"--part={wrong}")
        assert (code, err) == (2, f"data_prep: --part '{wrong}': it is I/N, such as 1/8 to 8/8\n")
    code, _, err = data_prep(*words, "--part", "1/2", "--stratify", "label")
    assert code == 2
    assert "--stratify has to see all samples, --part only some" in err
    assert not Path(tmp_path / "OUT").exists()


def test_damaged_pieces_are_not_put_together(tmp_path, reference):
    out = tmp_path / "OUT"
    part(out, 1, 2)
    folder = out / PARTIAL / "pieces" / "00000"
    for name, content_, said in (
        ("train-00000.h5", b"", "is truncated: it has 0 bytes"),
        ("train-00000.h5", None, "train-00000.h5 is missing"),
        ("piece.json", None, "No such file"),
    ):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(content_) if content_ is not None else path.unlink()
        with pytest.raises(DataError, match=said) as caught:
            part(out, 2, 2)
        assert str(caught.value).startswith(f"{folder} is damaged (")
        path.write_bytes(before)
    shutil.rmtree(folder)  # the message says to do this
    part(out, 1, 2)
    assert content(out) == reference
    (out / PARTIAL).mkdir()
    (out / PARTIAL / "commit.json").write_text("{")
    with pytest.raises(DataError, match=r"commit\.json is damaged: what was to be moved into"):
        part(out, 1, 2)


def test_a_damaged_plan_or_result_is_refused(tmp_path, data_prep):
    """What a record may hold is tested with records; here, what is said and how one goes on."""
    out = tmp_path / "OUT"
    np.save(tmp_path / "x.npy", np.arange(20.0))
    words = ("arrays", tmp_path / "x.npy", out, "--shard-size", "0.04KB")
    assert data_prep(*words, "--part", "1/2")[0] == 0
    folder = out / PARTIAL / "pieces" / "00000"
    for path, start, end in (
        (
            folder / "piece.json",
            f"{folder} is damaged (",
            "): remove it, and give the command again",
        ),
        (out / PARTIAL / "job.json", "", f"; remove {out / PARTIAL} to begin anew"),
    ):
        before = path.read_bytes()
        path.write_bytes(before.replace(b'"train-00000.h5"', b'"../train.h5"')[:-9])
        for again in ((*words, "--part", "2/2"), ("finalize", out), words):
            code, _, err = data_prep(*again)
            said = err.splitlines()[-1]
            assert code == 3
            assert said.startswith(f"data_prep: {start or path}")
            assert said.endswith(end)
        if start:
            path.write_bytes(before)
    assert data_prep(*words, "--overwrite")[0] == 0
    assert sum(shard.count for shard in Index.load(out).shards) == 20


def test_a_file_system_without_locks(tmp_path, reference, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    out = tmp_path / "OUT"
    for i in (1, 2):  # neither part knows that it is the last
        assert part(out, i, 2, quiet=False) is None
    said = capsys.readouterr().out
    assert f"puts them together; if none is: python -m data_prep finalize {out}" in said
    finalize_parts(out)
    assert content(out) == reference


def test_locks(tmp_path):
    first = commit.lock(tmp_path, shared=True)
    second = commit.lock(tmp_path, shared=True)
    with pytest.raises(StorageError, match="another process is writing"):
        commit.lock(tmp_path)
    assert not commit.alone(tmp_path, first)  # the shared lock is lost
    assert commit.alone(tmp_path, second)
    commit.discard(tmp_path)
    third = commit.lock(tmp_path)  # the folder's lock is a new file
    assert not commit.holds(tmp_path, second)
    assert commit.holds(tmp_path, third)
    for descriptor in (first, second, third):
        commit.unlock(descriptor)
    assert os.listdir(tmp_path) == [PARTIAL]
    commit.settle(tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_unfinished_conversion_of_before_that_collects(tmp_path, monkeypatch):
    source, out = hand([Row(1)], [Row(2, bad="odd")]), tmp_path / "OUT"
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "alone", lambda _: False)
        for i in (1, 2):
            convert(source, out, options(part=(i, 2), on_error="skip"))
    plan = out / PARTIAL / "job.json"
    plan.write_text(plan.read_text().replace('"skip"', '"collect"'))
    with pytest.raises(DataError, match="odd; --on-error skip leaves such records out"):
        finalize_parts(out)
    assert convert(source, out, options(on_error="skip")).split("train").count == 1
