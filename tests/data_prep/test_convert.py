import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data_prep import progress
from data_prep.cli import main
from hpctrain.data.format import PARTIAL, digest_file, write_shards
from hpctrain.data.index import Index

COMMAND = [sys.executable, "-m", "data_prep"]


@pytest.fixture
def numbers(tmp_path):
    np.save(tmp_path / "y.npy", np.arange(100))
    return tmp_path / "y.npy"


def digests(folder):
    index = Index.load(folder)
    for shard in index.shards:
        assert digest_file(folder / shard.path) == shard.digest
    assert sorted(os.listdir(folder)) == sorted(["index.json", *(s.path for s in index.shards)])
    return index.digest


def test_the_same_command_twice_does_the_work_once(tmp_path, numbers, data_prep):
    out = tmp_path / "OUT"
    assert data_prep("arrays", numbers, out)[0] == 0
    before = (out / "index.json").read_bytes(), (out / "train-00000.h5").stat().st_mtime_ns
    code, said, err = data_prep("arrays", numbers, out)
    assert (code, err) == (0, "")
    assert said == f"{out} already holds this data set: {Index.load(out).digest}\n"
    os.rename(numbers, tmp_path / "z.npy")  # the same content from elsewhere
    assert "already holds" in data_prep("arrays", "--field", f"y={tmp_path}/z.npy", out)[1]
    assert "already holds" in data_prep("arrays", "--field", f"y={tmp_path}/z.npy", out)[1]
    assert before == (
        (out / "index.json").read_bytes(),
        (out / "train-00000.h5").stat().st_mtime_ns,
    )


@pytest.mark.parametrize(
    "other", [["--shard-size", "100KB"], ["--split", "train=0.5,val=0.5"], ["--field", "z=FILE"]]
)
def test_another_data_set_is_replaced_only_when_asked(tmp_path, numbers, data_prep, other):
    out = tmp_path / "OUT"
    data_prep("arrays", numbers, out)
    before = digests(out)
    other = [arg.replace("FILE", str(numbers)) for arg in other]
    code, said, err = data_prep("arrays", numbers, out, *other)
    assert (code, said) == (3, "")
    assert err == f"data_prep: {out} holds another data set, {before}; --overwrite replaces it\n"
    assert digests(out) == before
    assert data_prep("arrays", numbers, out, *other, "--overwrite")[0] == 0
    digests(out)


def test_changed_sources_are_noticed(tmp_path, numbers, data_prep):
    out = tmp_path / "OUT"
    data_prep("arrays", numbers, out)
    np.save(numbers, np.arange(100)[::-1].copy())
    assert "holds another data set" in data_prep("arrays", numbers, out)[2]


def test_a_damaged_data_set_is_not_taken_for_finished(tmp_path, numbers, data_prep):
    out = tmp_path / "OUT"
    data_prep("arrays", numbers, out)
    whole = digests(out)
    (out / "train-00000.h5").write_bytes(b"")
    code, _, err = data_prep("arrays", numbers, out)
    assert code == 3
    assert "is truncated: it has 0 bytes" in err
    assert "--overwrite" in err
    assert data_prep("arrays", numbers, out, "--overwrite")[0] == 0
    assert digests(out) == whole


def test_a_folder_of_something_else_is_left_alone(tmp_path, numbers, data_prep):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    for option in ([], ["--overwrite"]):
        code, _, err = data_prep("arrays", numbers, tmp_path / "thesis", *option)
        assert code == 3
        assert "is not empty and holds no data set (there is 'chapter.tex')" in err
    (tmp_path / "thesis" / "index.json").write_text('{"format": "mds", "version": 2}')
    code, _, err = data_prep("arrays", numbers, tmp_path / "thesis", "--overwrite")
    assert code == 3
    assert "format is 'mds'" in err
    assert sorted(os.listdir(tmp_path / "thesis")) == ["chapter.tex", "index.json"]


def test_out_is_a_file(numbers, data_prep):
    code, _, err = data_prep("arrays", numbers, numbers)
    assert code == 3
    assert "is a file; OUT is a folder" in err


def test_out_cannot_be_made(numbers, data_prep):
    code, _, err = data_prep("arrays", numbers, "/proc/nothing/here")
    assert code == 6
    assert "cannot write /proc/nothing/here: No such file or directory" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_out_is_not_writable(tmp_path, numbers, data_prep):
    (tmp_path / "OUT").mkdir(mode=0o500)
    code, _, err = data_prep("arrays", numbers, tmp_path / "OUT")
    assert code == 6
    assert "Permission denied" in err


FULL = """
import resource, sys
from data_prep.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # as a disk that gets full
sys.exit(main(sys.argv[1:]))
"""


def test_the_disk_is_full_in_the_middle(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1000, 1000)))
    command = [sys.executable, "-c", FULL, "arrays", tmp_path / "x.npy", tmp_path / "OUT"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 6, result.stderr
    assert "cannot write" in result.stderr
    assert "train-00000.h5" in result.stderr
    assert os.listdir(tmp_path / "OUT") == []


def start(tmp_path, rows=40_000):
    """A conversion into many shards, once it is in the middle."""
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (rows, 1000)).flush()
    command = [*COMMAND, "arrays", tmp_path / "x.npy", tmp_path / "OUT", "--shard-size", "1MB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "OUT" / PARTIAL
    while len(list(partial.glob("*.h5")) if partial.exists() else []) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process, command


def test_killed_in_the_middle_it_is_run_again(tmp_path):
    process, command = start(tmp_path)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path / "OUT") == [PARTIAL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "40000 samples" in result.stdout
    digests(tmp_path / "OUT")


def test_ctrl_c_leaves_nothing(tmp_path):
    process, _ = start(tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "data_prep: interrupted; run the same command again\n")
    assert os.listdir(tmp_path / "OUT") == []


def test_another_one_at_the_same_time_is_refused(tmp_path):
    process, command = start(tmp_path)
    process.send_signal(signal.SIGSTOP)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    process.send_signal(signal.SIGCONT)
    assert result.returncode == 6
    assert "another process is writing a data set into" in result.stderr
    assert process.wait(120) == 0
    process.communicate()
    digests(tmp_path / "OUT")


def test_a_traceback_only_when_asked_for(tmp_path, monkeypatch):
    for debug, tracebacks in (("0", 0), ("1", 1)):
        monkeypatch.setenv("HPCTRAIN_DEBUG", debug)
        command = [*COMMAND, "inspect", tmp_path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.stderr.count("Traceback") == tracebacks
        assert "has no index.json" in result.stderr


def test_provenance(tmp_path, numbers, data_prep):
    data_prep("arrays", numbers, tmp_path / "OUT", "--split", "train=0.5,val=0.5")
    found = Index.load(tmp_path / "OUT").provenance
    assert found["command"].startswith(f"python -m data_prep arrays {numbers} ")
    assert set(found) == {"command", "created", "versions", "options", "source"}
    assert set(found["versions"]) == {"hpctrain", "python", "numpy", "h5py", "hdf5"}
    assert found["options"] == {"shard_bytes": 256 * 2**20}
    assert found["source"]["split"] == {"train": 0.5, "val": 0.5}
    assert found["source"]["digest"].startswith("xxh3_128:")


def test_a_data_set_of_another_tool_is_another_data_set(tmp_path, numbers, data_prep):
    write_shards(tmp_path / "OUT", [("train", {"y": np.arange(100)})])
    assert "holds another data set" in data_prep("arrays", numbers, tmp_path / "OUT")[2]


def test_quiet(tmp_path, numbers, data_prep):
    for _ in range(2):
        assert data_prep("arrays", numbers, tmp_path / "OUT", "--quiet") == (0, "", "")


def test_progress_in_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    batches = [("train", {"x": np.zeros(10)})] * 3
    assert list(progress.track(iter(batches), 30)) == batches
    assert list(progress.track(iter(batches), None)) == batches
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("20 samples of 30, 0 s left, ")
    assert lines[4].startswith("20 samples, ")


def test_progress_on_a_terminal(tmp_path, numbers):
    controller, terminal = os.openpty()
    command = [*COMMAND, "arrays", numbers, tmp_path / "OUT", "--split", "train=0.5,val=0.5"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    subprocess.run(command, stderr=terminal, env=environment, timeout=60, check=True)
    os.close(terminal)
    assert b"100/100" in os.read(controller, 65_536)
    os.close(controller)


def test_help_is_quick_and_torch_is_never_loaded(tmp_path, numbers):
    code = (
        "import sys; from data_prep.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'h5py', 'rich', 'sklearn', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"assert main(['arrays', {str(numbers)!r}, {str(tmp_path / 'OUT')!r}]) == 0\n"
        f"assert main(['inspect', {str(tmp_path / 'OUT')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_bug_keeps_its_traceback(monkeypatch):
    from data_prep import show

    def bug(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(show, "show", bug)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "x"])
