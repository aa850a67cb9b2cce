"""Run data_prep many times, each time in a new process that kills itself at its K-th disk change.

    python crash.py FOLDER REFERENCE < [[SETUP…], [COMMAND…]]

Commands are lists of words, in which OUT is replaced by FOLDER. For K = 1, 2, …: run the set-up,
run the command and kill it at K, run it again and kill it soon after the start, and run it to the
end. Then OUT must be like the reference. The number of all K is printed.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import data_prep.convert
import data_prep.sources.arrays  # noqa: F401  once here, not in each process
from data_prep.cli import main
from hpctrain.data.index import Index

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(words: list[str], kill_at: int = 0) -> int:
    """Run a command in a new process; return the exit status of the process."""
    child = os.fork()
    if not child:
        try:
            if kill_at:
                count_down(kill_at)
            code = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 99
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_down(left: int) -> None:
    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple) -> None:
        if event in EVENTS or (event == "open" and args[2] & WRITES):
            count()

    sync = os.fsync

    def fsync(descriptor: int) -> None:
        count()
        sync(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


def content(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {path.name: path.read_bytes() for path in folder.glob("*.h5")}
    index = json.loads((folder / "index.json").read_bytes())
    for key in ("command", "created"):
        del index["provenance"][key]
    return found | {"index": index, "names": sorted(os.listdir(folder))}


def crashes(out: Path, reference: Path, *commands: list[str]) -> int:
    *setup, last = [[word.replace("OUT", str(out)) for word in words] for words in commands]
    wanted = content(reference)
    for kill_at in range(1, 10_000):
        shutil.rmtree(out, ignore_errors=True)
        for words in setup:
            assert run(words) == 0, words
        status = run(last, kill_at)
        whole = status == 0
        if status == -signal.SIGKILL:
            if (out / "index.json").exists():
                Index.load(out).check(out)  # the old data set or the new one, never half of one
            run(last, kill_at * 7 % 23 + 1)  # killed again, soon after the start
            status = run(last)
        assert status == 0, (kill_at, status)
        found = content(out)
        assert found == wanted, (kill_at, found["names"], wanted["names"])
        if whole:
            return kill_at - 1
    raise AssertionError("it never ends")


if __name__ == "__main__":
    print(crashes(Path(sys.argv[1]), Path(sys.argv[2]), *json.load(sys.stdin)))
