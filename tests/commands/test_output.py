"""`--json` of the commands: what they print is what the schema says, and how they exit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Completed, run_module, runs

Train = Callable[..., Completed]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
KNOWN = {
    *("type", "enum", "required", "properties", "additionalProperties", "items", "$ref"),
    "description",
}
SHORT = ("train.max_steps=3", "tracking=off", "hydra/launcher=submitit_local")


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    done = run_module("hpctrain", "--help", "json")
    found: dict[str, Any] = json.loads(done.stdout)["$defs"]
    return found


def wrong(value: Any, schema: Any, schemas: dict[str, Any], where: str) -> Iterator[str]:
    """Yield where a value is not what a schema says, for the words that our schemas use."""
    assert {*schema} <= KNOWN, schema
    if "$ref" in schema:
        yield from wrong(value, schemas[schema["$ref"].removeprefix("#/$defs/")], schemas, where)
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    kinds = schema.get("type", [*TYPES])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [isinstance(value, TYPES[kind]) for kind in kinds]
    if not any(fits) or (isinstance(value, bool) and "boolean" not in kinds):
        yield f"{where}: {value!r} is no {kinds}"
    if isinstance(value, list) and "items" in schema:
        for number, each in enumerate(value):
            yield from wrong(each, schema["items"], schemas, f"{where}[{number}]")
    if isinstance(value, dict):
        given, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (
            f"{where}: lacks {name}" for name in schema.get("required", ()) if name not in value
        )
        for name, each in value.items():
            if name in given or isinstance(others, dict):
                yield from wrong(each, given.get(name, others), schemas, f"{where}.{name}")
            elif not others:
                yield f"{where}: {name} is not in the schema"


def checked(text: str, command: str, schemas: dict[str, Any]) -> Any:
    """Return the one JSON value of a text, which the schema of the command describes."""
    value = json.loads(text)
    assert list(wrong(value, schemas[command], schemas, command)) == []
    return value


def test_what_is_wrong_is_found(schemas: dict[str, Any]) -> None:
    (lacks, other) = wrong({"verdict": "good", "figures": {}}, schemas["doctor"], schemas, "x")
    assert (lacks, other) == (
        "x: lacks places",
        "x.verdict: 'good' is none of ['pass', 'unknown', 'warn', 'fail']",
    )
    more = {"verdict": "pass", "places": {}, "figures": {}, "new": 1}
    assert [*wrong(more, schemas["doctor"], schemas, "x")] == ["x: new is not in the schema"]


def test_a_submission_and_its_dry_run(
    train: Train, tmp_path: Path, schemas: dict[str, Any]
) -> None:
    dry = train("-m", "--json", "seed=1,2", *SHORT, "launch.dry_run=true", "launch.time_min=90")
    told = checked(dry.stdout, "-m", schemas)
    assert (told["dry_run"], told["jobs"], told["most_hours"]) == (True, 2, 3.0)
    assert (told["unit"], told["where"], told["sweep"]) == ("rank-hours", "here", None)
    assert [run["state"] for run in told["runs"]] == ["would run here"] * 2
    assert told["scripts"][0].startswith("#!/bin/bash\n")
    assert not (tmp_path / "runs").exists()
    plain = train("-m", "seed=1,2", *SHORT, "launch.dry_run=true", "launch.time_min=90")
    bound = "would queue 2 jobs, which by their time limits may take 3 rank-hours"
    assert bound in plain.stderr
    assert len(plain.stdout.splitlines()) == len("".join(told["scripts"]).splitlines())

    done = train("-m", "seed=1,2", *SHORT, "--json")
    told = checked(done.stdout, "-m", schemas)
    assert [run["state"] for run in told["runs"]] == ["finished"] * 2
    assert all(0 <= run["metric"] <= 1 for run in told["runs"])
    assert Path(told["sweep"], "sweep.json").exists()
    again = checked(train("-m", "seed=1,2", *SHORT, "--json").stdout, "-m", schemas)
    assert [run["state"] for run in again["runs"]] == ["finished before"] * 2
    assert (again["jobs"], again["most_hours"]) == (0, 0)

    # The other commands on what is there now.
    folder = str(tmp_path / "runs")
    rows = checked(
        run_module("hpctrain", "status", "--json", "--dir", folder).stdout, "status", schemas
    )
    assert {row["run"] for row in rows} == {run["run"] for run in told["runs"]}
    logs = run_module("hpctrain", "logs", told["runs"][0]["run"], "--json", "--lines", "2")
    log = checked(logs.stdout, "logs", schemas)
    assert (log["state"], log["rank"], len(log["lines"])) == ("finished", None, 2)
    assert log["lines"] == Path(log["log"]).read_text().splitlines()[-2:]


@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_a_submission_to_slurm(train: Train, tmp_path: Path, schemas: dict[str, Any]) -> None:
    words = ("seed=1,2", "train.max_steps=3", "tracking=off", "launch.time_min=30")
    # They need not run, so they are held.
    told = checked(train("-m", "--json", *words, "+site.sbatch.hold=true").stdout, "-m", schemas)
    assert (told["where"], told["jobs"], told["most_hours"]) == ("slurm", 2, 1.0)
    assert [run["state"] for run in told["runs"]] == ["queued"] * 2
    assert all(run["job"].endswith(f"_{n}") for n, run in enumerate(told["runs"]))
    assert all(run["metric"] is None for run in told["runs"])
    one = told["runs"][0]["run"]
    row = json.loads(run_module("hpctrain", "status", one, "--json").stdout)
    assert [each["job_id"] for each in row] == [told["runs"][0]["job"]]
    waited = train("-m", "--json", *words[1:], "seed=3", "launch.wait=true")
    told = checked(waited.stdout, "-m", schemas)
    assert [run["state"] for run in told["runs"]] == ["finished"]
    assert 0 <= told["runs"][0]["metric"] <= 1


def test_the_error_of_a_run(train: Train, tmp_path: Path, schemas: dict[str, Any]) -> None:
    (tmp_path / "bad_task.py").write_text("def Bad(**_):\n    raise ValueError('as asked')\n")
    train("tracking=off", "task._target_=bad_task.Bad", code=2, PYTHONPATH=str(tmp_path))
    (run,) = runs(tmp_path / "runs")
    done = run_module("hpctrain", "logs", str(run), "--json")
    told = checked(done.stdout, "logs", schemas)
    assert told["state"] == "failed"
    assert "as asked" in told["reason"]
    assert told["rank"] == 0
    assert any("as asked" in line for line in told["lines"])


def test_a_plan_and_a_doctor(
    digits: Path, tmp_path: Path, schemas: dict[str, Any], no_sbatch: dict[str, str]
) -> None:
    words = ("experiment=digits", f"data.path={digits}", "hardware=h100_sxm")
    plan = checked(run_module("hpctrain", "plan", *words, "--json").stdout, "plan", schemas)
    assert plan["layouts"][0]["fits"] is True
    found = run_module("hpctrain", "doctor", f"output_dir={tmp_path}/runs", "--json", **no_sbatch)
    assert checked(found.stdout, "doctor", schemas)["verdict"] in ("pass", "warn")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["launch.max_jobs=2"], "launch.max_jobs=2", "queue 3 jobs"),
        (["launch.max_jobs=8", "launch.chain=3"], "launch.max_jobs=8", "queue 9 jobs"),
        (["launch.max_jobs=1", "launch.pack=2"], "launch.max_jobs=1", "queue 2 jobs"),
        (["launch.budget_gpu_hours=2"], "launch.budget_gpu_hours=2", "may take 3 rank-hours"),
    ],
)
def test_a_bound_refuses_before_anything_is_queued(
    train: Train, tmp_path: Path, words: list[str], key: str, value: str
) -> None:
    done = train("-m", "--json", "seed=1,2,3", *SHORT, *words, code=2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: {key}: this would queue ")
    assert value in done.stderr
    assert "nothing was queued" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["experiment=digits", "--json"], "--json is of -m, and of the commands"),
        (["logs", "x", "--json", "-f"], "--json and --follow: a log that goes on is no object"),
    ],
)
def test_where_there_is_no_json(words: list[str], text: str) -> None:
    done = run_module("hpctrain", *words, code=2)
    assert text in done.stderr
    assert done.stdout == ""


def test_the_exit_codes_that_programs_see_are_on_their_page() -> None:
    from hpctrain import errors
    from hpctrain.insight.plan import plan_command
    from tests.conftest import ROOT

    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    kinds = vars(errors).values()
    codes = {
        each.exit_code for each in kinds if isinstance(each, type) and hasattr(each, "exit_code")
    }
    for code in {*codes, 0, 1, 130, 143, plan_command._DOES_NOT_FIT, plan_command._UNKNOWN}:
        assert f"\n| {code} | " in page
