"""All loaders side by side: a process for each, and rounds in which they run in turn.

Other programs run on the machine too: in a round they disturb all loaders alike, so that the
median of the rounds' ratios says more than any speed.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.benchmarks.loaders.competitors import BLOCK, COMPETITORS
from tests.benchmarks.loaders.disk import limited
from tests.benchmarks.loaders.environments import python_with
from tests.benchmarks.loaders.works import COLD, WORKS, Work

ROOT = Path(__file__).parents[3]
TRIES = 20  # with a tenth of a second between them
SLOW_DISK = 400 * 10**6  # bytes/s: less than the disks of virtual machines give at their worst


@dataclass
class Row:
    """What was measured of one competitor on one data set; a list has a number per round."""

    mb_s: list[float] = field(default_factory=list)
    mb_s_2: list[float] = field(default_factory=list)  # two processes, or two threads
    first_ms: list[float] = field(default_factory=list)
    resume_ms: list[float] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    cold_mb_s: list[float] = field(default_factory=list)
    dd_mb_s: list[float] = field(default_factory=list)
    limited_cold_mb_s: list[float] = field(default_factory=list)  # the same on a disk of SLOW_DISK
    limited_dd_mb_s: list[float] = field(default_factory=list)
    error: str = ""


Rows = dict[str, dict[str, Row]]  # by data set, by competitor


class Failed(Exception):
    """A competitor could not do what it was asked."""


class Entrant:
    """A competitor's process, seen from here."""

    def __init__(self, name: str, log: Path) -> None:
        self.kind = COMPETITORS[name]
        python = python_with(self.kind.package)
        # Their caches and locks are not left in the home folder, and nobody asks the network.
        home = log.with_suffix("")
        own = {"HOME": home, "TMPDIR": home, "HF_HUB_OFFLINE": 1}
        own |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        home.mkdir()
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, "-m", "tests.benchmarks.loaders.child", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | {key: str(value) for key, value in own.items()},
            )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Do as the method `do` of `child.Child` says.

        Raises:
            Failed: With its message, or because it is gone.
        """
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '{"error": "it died"}')
        except BrokenPipeError:
            raise Failed("it died") from None
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:  # it ends when stdin does
            self.process.communicate()
        else:
            self.process.kill()
            self.process.communicate()


def race(root: Path, rounds: int, epochs: int) -> tuple[Rows, dict[str, str]]:
    """Measure everybody.

    Args:
        root: For the data; everything there is removed again, but for the logs.
        rounds: How many times each loader is measured.
        epochs: Length of a loop whose speed is measured.

    Returns:
        The rows, and the versions of the peers.
    """
    rows: Rows = {work: {name: Row() for name in COMPETITORS} for work in WORKS}
    versions = {}
    with ExitStack() as stack:
        entrants = {}
        for name, kind in COMPETITORS.items():
            try:
                entrant = Entrant(name, root / f"{kind.__name__}.log")
                entrants[name] = stack.enter_context(entrant)
                versions[name] = entrant.ask("hello")
            except (Failed, RuntimeError) as error:
                entrants.pop(name, None)
                for table in rows.values():
                    table[name].error = str(error)
        for work in WORKS.values():
            folder = root / work.name
            work.write(folder)
            run = _Run(work, folder, entrants, rows[work.name])
            run.prepare()
            for number in range(rounds):
                run.round(number, epochs)
            run.cold(rounds)
            shutil.rmtree(folder)
    return rows, versions


class _Run:
    """The rounds on one data set; who fails has a row that says so, and does not go on."""

    def __init__(
        self, work: Work, folder: Path, entrants: dict[str, Entrant], rows: dict[str, Row]
    ) -> None:
        self.work, self.folder, self.entrants, self.rows = work, folder, entrants, rows

    def prepare(self) -> None:
        for name, entrant in self.entrants.items():
            row = self.rows[name]
            try:
                entrant.ask("write", work=self.work.name, root=str(self.folder))
            except Failed as error:
                row.error = str(error)
        self._read_all()
        for name, entrant in self.entrants.items():
            row = self.rows[name]
            try:
                row.check = {} if row.error else entrant.ask("check")
            except Failed as error:
                row.error = str(error)

    def _read_all(self) -> None:
        """Have everybody's files in the page cache as reading them leaves them there.

        As they were written, some lie in huge pages and some in small ones: a tenth of the speed.
        """
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            with suppress(Failed):  # a page that is in use stays as it is
                _forget([path])
            _dd(path)

    def round(self, number: int, epochs: int) -> None:
        """Measure each loader once."""
        for name in self.entrants:
            row, entrant = self.rows[name], self.entrants[name]
            if row.error:
                continue
            try:
                row.mb_s.append(entrant.ask("speed", epochs=epochs))
                row.first_ms.append(entrant.ask("start"))
                if row.check:
                    row.resume_ms.append(entrant.ask("start", resume=True))
                if entrant.kind.parallel and not number:  # processes take long to start
                    row.mb_s_2.append(entrant.ask("speed", epochs=epochs, workers=2))
            except Failed as error:
                row.error = str(error)

    def cold(self, rounds: int) -> None:
        """One epoch in block mode from the disk, beside dd; then on a disk of SLOW_DISK."""
        row = self.rows[BLOCK]
        if row.error or BLOCK not in self.entrants:
            return
        root, entrant = self.folder / "cold", self.entrants[BLOCK]
        COLD[self.work.name].write(root)
        processes = [os.getpid(), entrant.process.pid]
        try:
            entrant.ask("write", work=self.work.name, root=str(root), cold=True)
            shards = sorted((root / COMPETITORS[BLOCK].__name__).glob("*.h5"))
            for number in range(rounds):
                self._cold(number, shards, row.dd_mb_s, row.cold_mb_s)
            with limited(self.folder, SLOW_DISK, processes) as possible:
                for number in range(min(rounds, 3) if possible else 0):
                    self._cold(number, shards, row.limited_dd_mb_s, row.limited_cold_mb_s)
        except Failed as error:
            row.error = f"cold: {error}"

    def _cold(
        self, number: int, shards: list[Path], dd_mb_s: list[float], cold_mb_s: list[float]
    ) -> None:
        """Both in turn, each first in every other round: memory freed just before is faster."""

        def dd() -> float:
            start = time.perf_counter()
            for path in shards:
                _dd(path)
            size = sum(path.stat().st_size for path in shards)
            return size / (time.perf_counter() - start) / 1e6

        def epoch() -> float:
            found: float = self.entrants[BLOCK].ask("epoch")
            return found

        turns = [(dd_mb_s, dd), (cold_mb_s, epoch)]
        for speeds, measure in reversed(turns) if number % 2 else turns:
            _forget(shards)
            speeds.append(measure())


def _dd(path: Path) -> None:
    """Read a file."""
    command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"]
    subprocess.run(command, check=True)


def _forget(paths: list[Path]) -> None:
    """Take files out of the page cache, this file's pages only: others work on this machine.

    Raises:
        Failed: They are still there.
    """
    for path in paths:
        for _ in range(TRIES):  # what is being read ahead cannot go yet
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                middle = path.stat().st_size // 2
                try:
                    os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
                except OSError:  # it would have to wait: the page is not there
                    break
            time.sleep(0.1)
        else:
            raise Failed("the page cache does not let go of the files")


def as_json(rows: Rows, versions: dict[str, str]) -> dict[str, Any]:
    """Every number of every round."""
    return {
        "versions": versions,
        "works": {
            work: {
                "count": WORKS[work].count,
                "batch": WORKS[work].batch,
                "rows": {name: asdict(row) for name, row in table.items()},
            }
            for work, table in rows.items()
        },
    }
