"""Measures all loaders side by side: each has its own process, and they run in turn in rounds.

Other programs on the machine disturb all loaders of a round alike. So the median of the rounds'
ratios says more than a single speed.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.benchmarks.loaders.competitors import BLOCK, COMPETITORS
from tests.benchmarks.loaders.environments import python_with
from tests.benchmarks.loaders.works import COLD, WORKS, Work

ROOT = Path(__file__).parents[3]
TRIES = 20  # to drop a file from the page cache, 0.1 s apart


@dataclass
class Row:
    """The measurements of one competitor on one data set; a list has a number per round."""

    mb_s: list[float] = field(default_factory=list)
    mb_s_2: list[float] = field(default_factory=list)  # with two processes or two threads
    first_ms: list[float] = field(default_factory=list)
    resume_ms: list[float] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    cold_mb_s: list[float] = field(default_factory=list)
    dd_mb_s: list[float] = field(default_factory=list)
    error: str = ""


Rows = dict[str, dict[str, Row]]  # by data set, by competitor


class Failed(Exception):
    """A measurement of a competitor failed."""


class Entrant:
    """A competitor's process, to which requests can be sent."""

    def __init__(self, name: str, log: Path) -> None:
        self.kind = COMPETITORS[name]
        python = python_with(self.kind.package)
        # Peers must not leave caches and locks in the home folder, or use the network.
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
        """Call the method `do` of `child.Child` in the process, and return its result."""
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        self.process.communicate()  # the process ends when its stdin is closed


def race(root: Path, rounds: int, epochs: int) -> tuple[Rows, dict[str, str]]:
    """Measure all competitors on all data sets; return that, and the versions of their packages.

    The logs stay in `root`; the data in it are removed at the end.
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
    """The rounds on one data set. A competitor that fails is not measured again."""

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
        """Drop the files of all competitors from the page cache, and read them again.

        Files that were just written lie partly in huge pages and partly in small ones, which
        changes the speed by a tenth.
        """
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            with suppress(Failed):  # a page that is in use cannot be dropped
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
                if entrant.kind.parallel and not number:  # once only: processes start slowly
                    row.mb_s_2.append(entrant.ask("speed", epochs=epochs, workers=2))
            except Failed as error:
                row.error = str(error)

    def cold(self, rounds: int) -> None:
        """Measure an epoch of block shuffle from the disk, beside dd."""
        row = self.rows[BLOCK]
        if row.error or BLOCK not in self.entrants:
            return
        root, entrant = self.folder / "cold", self.entrants[BLOCK]
        COLD[self.work.name].write(root)
        try:
            entrant.ask("write", work=self.work.name, root=str(root), cold=True)
            shards = sorted((root / COMPETITORS[BLOCK].__name__).glob("*.h5"))
            for number in range(rounds):
                self._cold(number, shards, row)
        except Failed as error:
            row.error = f"cold: {error}"

    def _cold(self, number: int, shards: list[Path], row: Row) -> None:
        """Measure dd and an epoch of block shuffle; the order of the two changes in every round.

        The second one may be faster, because it gets memory that was freed just before.
        """

        def dd() -> float:
            start = time.perf_counter()
            for path in shards:
                _dd(path)
            size = sum(path.stat().st_size for path in shards)
            return size / (time.perf_counter() - start) / 1e6

        def epoch() -> float:
            found: float = self.entrants[BLOCK].ask("speed", epochs=1)
            return found

        turns = [(row.dd_mb_s, dd), (row.cold_mb_s, epoch)]
        for speeds, measure in reversed(turns) if number % 2 else turns:
            _forget(shards)
            speeds.append(measure())


def _dd(path: Path) -> None:
    """Read a file with dd."""
    command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"]
    subprocess.run(command, check=True)


def _forget(paths: list[Path]) -> None:
    """Drop these files from the page cache, and nothing else: the machine may have other users."""
    for path in paths:
        for _ in range(TRIES):  # pages that are being read ahead cannot be dropped yet
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                middle = path.stat().st_size // 2
                try:
                    os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
                except OSError:  # the read would have to wait: the page is not in the cache
                    break
            time.sleep(0.1)
        else:
            raise Failed("the page cache does not let go of the files")


def as_json(rows: Rows, versions: dict[str, str]) -> dict[str, Any]:
    """Return every number of every round, in types that JSON has."""
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
