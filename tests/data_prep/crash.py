"""Kill a data_prep command at each of its disk changes; running it again must complete the work.

    python crash.py FOLDER REFERENCE EVERY < COMMANDS.json

The standard input is a JSON list of commands: any set-up commands, then the command to test. Each
command is a list of words, in which OUT is replaced by FOLDER. For K = 1, 1 + EVERY, … it makes
FOLDER what the set-up commands had left, and runs the last command in a process that kills itself
just before its K-th disk change. The script runs the last command again, kills it soon after the
start, and then runs it to the end. FOLDER must then have the same content as REFERENCE. When the
command makes fewer than K disk changes, the script prints their number and ends.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

# Not needed by name: each of hundreds of forked processes would otherwise import them for itself.
import data_prep.sources.arrays
import data_prep.writing.convert  # noqa: F401
from data_prep.cli import main
from hpctrain.data.shards.index import Index

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(words: list[str], kill_at: int = 0) -> int:
    """Run a command in a forked process; return its exit code, or minus the signal that killed it.

    If `kill_at` is not 0, the process kills itself just before its `kill_at`-th disk change.
    """
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
    """Let this process kill itself just before it changes the disk for the `left`-th time."""

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
    """Return the shards, the index and the file names of a data set, for a comparison.

    The command and the time of the conversion are left out of the index.
    """
    found: dict[str, object] = {path.name: path.read_bytes() for path in folder.glob("*.h5")}
    index = json.loads((folder / "index.json").read_bytes())
    for key in ("command", "created"):
        del index["provenance"][key]
    return found | {"index": index, "names": sorted(os.listdir(folder))}


def crashes(out: Path, reference: Path, every: int, *commands: list[str]) -> int:
    """Do what the module says; return the number of disk changes of the last command."""
    *setup, last = [[word.replace("OUT", str(out)) for word in words] for words in commands]
    wanted = content(reference)
    for words in setup:
        assert run(words) == 0, words
    begun = out.with_name("begun")
    if setup:
        out.rename(begun)
    for kill_at in range(1, 10_000, every):
        shutil.rmtree(out, ignore_errors=True)
        if setup:
            shutil.copytree(begun, out)
        status = run(last, kill_at)
        whole = status == 0
        if status == -signal.SIGKILL:
            if (out / "index.json").exists():
                Index.load(out).check(out)  # the old or the new data set is complete
            run(last, kill_at * 7 % 23 + 1)  # kill it again, soon after the start
            status = run(last)
        assert status == 0, (kill_at, status)
        found = content(out)
        assert found == wanted, (kill_at, found["names"], wanted["names"])
        if whole:
            return kill_at - 1
    raise AssertionError("it never ends")


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    print(crashes(*folders, int(sys.argv[3]), *json.load(sys.stdin)))
