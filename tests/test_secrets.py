"""A secret of the environment reaches the program that needs it, but no file and no message."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain import secrets
from hpctrain.config.compose import compose as compose_config
from hpctrain.config.frozen import dump, load
from hpctrain.config.identity import identity
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.launch.script import sbatch_script
from hpctrain.tracking.meta import Meta
from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs

Train = Callable[..., Completed]
SECRET = "s3cr3t/va:lue'with$igns"
TOKEN = "tok-4f9a2c71e8"
TOLD = """\
import logging
import os

import torch

log = logging.getLogger(__name__)


class Model(torch.nn.Linear):
    def __init__(self, token, end):
        super().__init__(64, 10)
        assert token == os.environ["MY_API_TOKEN"], "it has to arrive"
        self.token, self.end = token, end
        log.warning("logging in with %s", token)

    def forward(self, batch):
        try:
            raise KeyError(self.token)
        except KeyError:
            log.exception("the server does not know us")
        if self.end == "raise":
            raise RuntimeError(f"401 for https://me:{self.token}@host/x")
        return super().forward(batch.flatten(1))
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", TOKEN)
    monkeypatch.setenv("DB_PASSWORD", SECRET)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("MLFLOW_TRACKING_PASSWORD", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("wandb_api_key", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS", False),
        ("HOME", False),
        ("MY_LICENCE", True),
        ("SITE_ONE", True),
    ],
)
def test_names(monkeypatch: pytest.MonkeyPatch, name: str, expected: bool) -> None:
    monkeypatch.setenv("HPCTRAIN_SECRETS", "MY_LICENCE, SITE_*")
    assert secrets.is_secret(name) is expected


def test_what_is_short_or_a_path_is_let_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("A_TOKEN", "true")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert secrets.mask(f"true {tmp_path}") == f"true {tmp_path}"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("written", [str, repr, json.dumps, lambda text: repr([text])])
def test_masked_however_it_is_written(written: Callable[[str], str]) -> None:
    text = f"before {written(SECRET)} between {written(TOKEN)} after"
    masked = secrets.mask(text)
    assert SECRET not in masked
    assert "s3cr3t" not in masked
    assert TOKEN not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


def test_passwords_in_urls_are_masked() -> None:
    masked = secrets.mask("GET http://me:pw@host:5000/x and https://host:5000/a@b")
    assert masked == "GET http://me:***@host:5000/x and https://host:5000/a@b"


@settings(deadline=None)
@given(st.text(), st.text(min_size=6).filter(lambda text: "\0" not in text), st.text())
def test_a_reference_expands_to_what_was_there(before: str, secret: str, after: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("MY_API_TOKEN", secret)
        except UnicodeEncodeError:
            return  # no environment variable can hold this text
        text = before + secret + after
        referred = secrets.reference(text)
        assert secret not in referred or secret in "${oc.env:MY_API_TOKEN}"
        if "${oc.env:" not in text:
            assert secrets.expand(referred) == text


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8")))
def test_a_shell_says_it_again(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_TOKEN", TOKEN)
        whole = f"{text}{TOKEN}{text}"
        word = secrets.shell_word(whole)
        assert TOKEN not in word
        said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
        assert said.stdout.decode() == whole


@pytest.mark.usefixtures("environment")
def test_logging_masks_messages_and_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("test_secrets")
    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        secrets.mask_logging()
        try:
            raise ValueError(f"refused: {TOKEN}")
        except ValueError:
            log.exception("with %s", SECRET)
            assert TOKEN in traceback.format_exc()
    finally:
        root.removeHandler(handler)
    said = capsys.readouterr().err
    assert "ValueError: refused: ***" in said
    assert "with ***" in said


@pytest.fixture
def config(digits: Path, tmp_path: Path, environment: None) -> Config:
    composed = compose_config(
        [
            "experiment=digits",
            f"data.path={digits}",
            f"output_dir={tmp_path}/runs",
            "optimizer._target_=functools.partial",  # takes any options
            "+optimizer.options.a=${oc.env:MY_API_TOKEN}",
            "+optimizer.options.b='Bearer ${oc.env:DB_PASSWORD}!'",
            f"+site.env.OTHER_TOKEN={TOKEN}",
        ]
    )
    assert composed is not None
    return composed


def test_a_frozen_config_holds_the_reference(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate(config)
    text = dump(config)
    assert TOKEN not in text
    assert "s3cr3t" not in text
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert load(file) == config
    assert config.optimizer.options["b"] == f"Bearer {SECRET}!"
    # A renewed token does not make another run.
    before = identity(config, "d")
    monkeypatch.setenv("MY_API_TOKEN", "renewed-token")
    assert load(file).optimizer.options["a"] == "renewed-token"
    assert identity(load(file), "d") == before
    monkeypatch.delenv("MY_API_TOKEN")
    with pytest.raises(ConfigError, match="variable MY_API_TOKEN is not set here"):
        load(file)


def test_the_script_exports_by_reference(config: Config) -> None:
    text = sbatch_script(config, Path("/sweep"), 1)
    assert 'export OTHER_TOKEN="${MY_API_TOKEN}"' in text
    assert TOKEN not in text


def test_the_trackers_note_holds_the_reference(config: Config, tmp_path: Path) -> None:
    meta = Meta(f"http://me:{TOKEN}@host:5000", "experiment", "run", "uid")
    meta.write(tmp_path)
    assert TOKEN not in (tmp_path / "journal" / "meta.json").read_text()
    assert Meta.read(tmp_path) == meta


def test_what_would_be_written_down_is_refused(config: Config) -> None:
    site = replace(config.site, env={"HF_TOKEN": "typed-here"}, setup=[f"login --token {TOKEN}"])
    tracking = replace(config.tracking, uri="http://me:typed@host:5000")
    with pytest.raises(ConfigError) as caught:
        validate(replace(config, site=site, tracking=tracking))
    told = str(caught.value).splitlines()
    assert len(told) == 3
    assert "site.env.HF_TOKEN would be written into the job's script: export HF_TOKEN" in told[1]
    assert "site.setup holds the value of MY_API_TOKEN" in told[2]
    assert "tracking.uri=http://me:***@host:5000 holds a password" in told[0]
    assert "typed" not in str(caught.value)


def test_env_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SECRET", "short")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"/logs/{TOKEN}")
    monkeypatch.setenv("MY_API_TOKEN", TOKEN)
    shown = json.loads(run_module("hpctrain", "env", "--json").stdout)["environment"]
    assert (shown["NCCL_SECRET"], shown["NCCL_DEBUG_FILE"]) == ("***", "/logs/***")


@pytest.fixture
def told(tmp_path: Path) -> dict[str, str]:
    """The environment of a training whose model logs its token."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "told.py").write_text(TOLD)
    path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "MY_API_TOKEN": TOKEN}


def model(token: str, end: str) -> tuple[str, ...]:
    """Return overrides that choose the model which logs its token."""
    return (
        "model=mlp",
        "~model.in_features",
        "~model.hidden",
        "~model.out_features",
        "~model.dropout",
        "model._target_=told.Model",
        f"+model.token={token}",
        f"+model.end={end}",
        "train.max_steps=2",
        "launch.snapshot=off",
        "tracking.drain_s=60",
    )


def assert_nowhere(folder: Path, *said: str) -> None:
    found = subprocess.run(["grep", "-rla", TOKEN, str(folder)], capture_output=True, text=True)
    assert found.stdout == ""
    assert not [text for text in said if TOKEN in text]


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("${oc.env:MY_API_TOKEN}", id="reference"),
        # The two tests below have the value itself in their arguments, too.
        pytest.param(TOKEN, id="literal", marks=pytest.mark.slow),
    ],
)
def test_a_training_leaves_no_trace_of_it(
    train: Train, tmp_path: Path, told: dict[str, str], store: Path, token: str
) -> None:
    done = train(*model(token, "finish"), **told)
    assert "logging in with ***" in done.stderr
    assert "KeyError: '***'" in done.stderr
    (run,) = runs(tmp_path / "runs")
    log = (run / "logs" / "terminal_1.rank0.log").read_text()
    assert "Traceback (most recent call last)" in log
    with closing(sqlite3.connect(store)) as uploaded:
        assert uploaded.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    assert_nowhere(tmp_path / "runs", done.stdout, done.stderr)


def test_a_training_that_fails_leaves_no_trace_of_it(
    train: Train, tmp_path: Path, told: dict[str, str], store: Path
) -> None:
    failed = train(*model(TOKEN, "raise"), code=1, **told)
    assert "RuntimeError: 401 for https://me:***@host/x" in failed.stderr
    (run,) = runs(tmp_path / "runs")
    error = run_json(run)["attempts"][-1]["error"]
    assert error == "RuntimeError: 401 for https://me:***@host/x"
    log = (run / "logs" / "terminal_1.rank0.log").read_text()
    assert "RuntimeError: 401 for https://me:***@host/x\n" in log
    assert "Traceback (most recent call last)" in log
    with closing(sqlite3.connect(store)) as uploaded:
        assert uploaded.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    assert_nowhere(tmp_path / "runs", failed.stdout, failed.stderr)


@pytest.mark.usefixtures("store")
def test_a_sweep_here_leaves_no_trace_of_it(
    train: Train, tmp_path: Path, told: dict[str, str]
) -> None:
    (tmp_path / "bin").mkdir()
    common = ("-m", *model(TOKEN, "finish,raise"), f"+site.env.OTHER_TOKEN={TOKEN}")
    done = train(*common, "launch.tasks_per_node=2", code=4, PATH=str(tmp_path / "bin"), **told)
    states = sorted(run_json(run)["state"] for run in runs(tmp_path / "runs"))
    assert states == ["failed", "finished"]
    assert_nowhere(tmp_path / "runs", done.stdout, done.stderr)


@pytest.mark.slow  # the sweep here differs in the launcher only, and the script has its own test
@pytest.mark.slurm
@pytest.mark.usefixtures("store")
def test_a_sweep_on_the_cluster_leaves_no_trace_of_it(
    train: Train, tmp_path: Path, told: dict[str, str]
) -> None:
    cluster.require()
    common = ("-m", *model(TOKEN, "finish,raise"), f"+site.env.OTHER_TOKEN={TOKEN}")
    done = train(*common, "launch.wait=true", code=4, **told)
    states = sorted(run_json(run)["state"] for run in runs(tmp_path / "runs"))
    assert states == ["failed", "finished"]
    (script,) = tmp_path.glob("runs/sweeps/*/array-0/job.sh")
    assert 'export OTHER_TOKEN="${MY_API_TOKEN}"' in script.read_text()
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/logs/*.rank0.log"))
    assert "logging in with ***" in logs
    assert_nowhere(tmp_path / "runs", done.stdout, done.stderr)
