"""Compares hpctrain's loader with others: throughput, time to start, exactness, cold reads.

python -m pytest tests/benchmarks/test_loaders.py --benchmark-only
HPCTRAIN_LOADERS=full python -m pytest tests/benchmarks/test_loaders.py --benchmark-only

The first run installs webdataset and mosaicml-streaming, each into an environment of its own under
~/.cache/hpctrain-peers, which sees this environment's torch.
The throughput is that of a plain loop over three epochs, with torch's default number of threads.
The first command uses half of the data. The second uses all of it and more rounds; it needs 10 GB
of memory and 10 GB of temporary disk. The tables are printed, and every number of every round is
written to .benchmarks/loaders.json. Times are reported, never asserted.
"""

import json
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.loaders.competitors import OURS
from tests.benchmarks.loaders.race import as_json, race
from tests.benchmarks.loaders.report import report
from tests.benchmarks.loaders.works import FULL

ROUNDS, EPOCHS = (5, 3) if FULL else (3, 3)


@pytest.mark.timeout(3600)
def test_loaders(
    benchmark: BenchmarkFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, versions = benchmark.pedantic(race, args=(tmp_path, ROUNDS, EPOCHS), rounds=1)
    found = Path(".benchmarks", "loaders.json")
    found.parent.mkdir(exist_ok=True)
    found.write_text(json.dumps(as_json(rows, versions), indent=1))
    with capsys.disabled():
        print(f"\n\n{report(rows, versions)}\n\n{found}")
    for work, table in rows.items():
        ours = table[OURS]
        assert not ours.error, work
        assert ours.check == {"missed": 0, "repeated": 0, "same_order": True}, work
