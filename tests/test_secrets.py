"""A secret of the environment reaches the program that needs it, but no file and no message."""

import base64
import html
import json
import logging
import os
import sqlite3
import subprocess
import sys
import traceback
import urllib.parse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base import secrets
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.composing.compose import compose as compose_config
from hpctrain.config.frozen import dump, load
from hpctrain.config.identity import identity
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.insight.report.tree import Sentences
from hpctrain.insight.report.views import html_view
from hpctrain.results.commands.export import main as export
from hpctrain.tracking.meta import Meta
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


SECRET_NAMES = (
    *("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "wandb_api_key"),
    *("MY_LICENCE", "SITE_ONE", "GITHUB_PAT", "GH_PAT", "MYSQL_PWD", "SSHPASS", "DB_PASS"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "SLURM_JWT"),
    *("HF_TOKENS", "API_TOKENS", "SECRET_TOKENIZER_PASSWORD", "PGPASSWORD", "NPM_TOKEN", "MAIL_PW"),
    *("LDAP_BINDPW", "COOKIE"),
    *("DOCKER_AUTH_CONFIG", "HTTP_AUTH", "HF_TOKEN_TOKENIZER", "TOKENIZER_API_TOKEN", "GCP_CREDS"),
)
OTHER_NAMES = (
    *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HOME", "tokens", "max_tokens", "num_tokens"),
    *("TOKENS_PER_STEP", "tokenizer", "mask", "mask_token", "PAD_TOKEN_ID", "EOS_TOKEN"),
    *("TOKENIZED_PATH", "TOKENIZER_PAD_TOKEN", "MY_TOKENIZER", "PWD", "OLDPWD", "PATH", "MONKEY"),
    *("PRIMARY_KEY", "COMPASS", "PATTERN", "BYPASS", "FILE_PAT", "KEYBOARD", "sort_key"),
)


@pytest.mark.parametrize("name", [*SECRET_NAMES, *OTHER_NAMES])
def test_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HPCTRAIN_SECRETS", "MY_LICENCE, SITE_*")
    assert secrets.is_secret(name) is (name in SECRET_NAMES)


def test_what_is_short_or_a_path_is_let_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("A_TOKEN", "true")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert secrets.mask(f"true {tmp_path}") == f"true {tmp_path}"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "written",
    [
        *(str, repr, json.dumps, lambda text: repr([text]), html.escape, urllib.parse.quote_plus),
        *(lambda text: repr(text.encode()), lambda text: json.dumps(text, ensure_ascii=False)),
        *(lambda text: base64.b64encode(text.encode()).decode(), lambda text: text.encode().hex()),
        lambda text: base64.urlsafe_b64encode(f"user:{text}".encode()).decode(),
        lambda text: urllib.parse.quote(text, safe=""),
    ],
)
def test_masked_however_it_is_written(written: Callable[[str], str]) -> None:
    text = f"before {written(SECRET)} between {written(TOKEN)} after"
    masked = secrets.mask(text)
    for form in (written(SECRET), written(TOKEN)):
        assert form[len(form) // 2 - 3 : len(form) // 2 + 3] not in masked
    assert SECRET not in masked
    assert "s3cr3t" not in masked
    assert TOKEN not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


MIXED = "1aB2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"  # looks random


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET http://me:pw@host:5000/x and more", "GET http://me:***@host:5000/x and more"),
        ("https://u:p@ss@host?private_token=abc", "https://u:***@host?private_token=***"),
        ("s3://KEY:se/cret@b", "s3://KEY:***@b"),
        ("s3://KEY:5e/c@ret@b/x", "s3://KEY:***@b/x"),
        ("https://me:pa/ss@host/x", "https://me:***@host/x"),
        ("https://me:p@s/s@host/x?mail=a@b", "https://me:***@host/x?mail=a@b"),
        ("https://me:pw@host/@scope/x", "https://me:***@host/@scope/x"),
        ("http://a:b@c,http://d:e@f", "http://a:***@c,http://d:***@f"),
        ("https://host/x?a=1&token=abc&b=2", "https://host/x?a=1&token=***&b=2"),
        ("https://b.blob.net/x?sv=1&sig=a%2Fb", "https://b.blob.net/x?sv=1&sig=***"),
        ("https://s3/x?X-Amz-Signature=ab12", "https://s3/x?X-Amz-Signature=***"),
        (f"https://{MIXED}@github.com/x", "https://***@github.com/x"),
    ],
)
def test_a_secret_of_a_url_is_masked(text: str, expected: str) -> None:
    assert secrets.mask(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("https://host:5000/a@b", "http://[::1]:5000/a@b", "https://host/a@b"),
        *("https://host/x?max_tokens=5&tokenizer=bpe", "sqlite:////a/b@c:d.db", "me@host:path"),
        *("https://me@host:1/x", "docker://ubuntu:22.04@sha256:0a1b", "s3://bucket/a@b"),
        *("tokens=5 max_tokens=1000000", "mask=***", "tokenizer.json of mask_token [MASK]"),
        "ssh://git@host/x@1",
        *("http://me:${oc.env:A_PASSWORD}@host", "https://host/x?token=${oc.env:A_TOKEN}"),
    ],
)
def test_what_is_no_secret_stays_visible(text: str) -> None:
    assert secrets.mask(text) == text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://u:p@ss@host?private_token=x", "https://host"),
        ("https://u:p/a@s@host/x.git?private_token=x#y", "https://host/x.git"),
        ("https://token@host:8443/x.git", "https://host:8443/x.git"),
        ("ssh://git@host/x.git", "ssh://host/x.git"),
        ("git@github.com:org/x.git", "git@github.com:org/x.git"),
        ("/srv/x.git", "/srv/x.git"),
    ],
)
def test_a_remote_without_credentials(url: str, expected: str) -> None:
    assert secrets.without_credentials(url) == expected


def test_the_values_decide_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_KEY", f"sk-{MIXED[:36]}")
    monkeypatch.setenv("SORT_KEY", "name,time")
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hunter22@db/x")
    monkeypatch.setenv("OPTUNA_DATABASE_URL", "sqlite:////scratch/optuna.db")
    monkeypatch.setenv("PWD", "/no/such/folder")
    known = secrets.known()
    assert known[f"sk-{MIXED[:36]}"] == "OPENAI_KEY"
    assert known["postgresql://me:hunter22@db/x"] == "DATABASE_URL"
    assert not {"OPTUNA_DATABASE_URL", "PWD", "SORT_KEY"} & set(known.values())
    assert secrets.reference(f"a sk-{MIXED[:36]}") == "a ${oc.env:OPENAI_KEY}"


@settings(deadline=None)
@given(st.text(), st.text(min_size=6).filter(lambda text: "\0" not in text), st.text())
def test_a_reference_expands_to_what_was_there(before: str, secret: str, after: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("MY_API_TOKEN", secret)
        except UnicodeEncodeError:
            return  # no environment variable can hold this text
        if secret.startswith("/") and os.path.exists(secret):
            return  # the name of a file is no secret
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
    text = sbatch_script(JobRequest.of(config), Path("/sweep"), 1)
    assert 'export OTHER_TOKEN="${MY_API_TOKEN}"' in text
    assert TOKEN not in text


def test_the_trackers_note_holds_the_reference(config: Config, tmp_path: Path) -> None:
    meta = Meta(f"http://me:{TOKEN}@host:5000", "experiment", "run", "uid")
    meta.write(tmp_path)
    assert TOKEN not in (tmp_path / "journal" / "meta.json").read_text()
    assert Meta.read(tmp_path) == meta


@pytest.mark.parametrize(
    "value",
    ["s3://KEY:se/cret@b", f"https://ghp_{MIXED[:36]}@github.com", "https://host/x?token=abcdef"],
)
def test_a_secret_that_the_environment_does_not_have_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    options = {**config.optimizer.options, "url": value}
    typed = replace(config, optimizer=replace(config.optimizer, options=options))
    with pytest.raises(ConfigError) as caught:
        validate(typed)
    assert f"optimizer.options.url={secrets.mask(value)} holds a password or token" in str(
        caught.value
    )
    assert value not in str(caught.value)
    # The same in a variable is written as a reference.
    monkeypatch.setenv("SERVICE_PASSWORD", value)
    validate(typed)
    assert value not in dump(typed)


def test_what_would_be_written_down_is_refused(config: Config) -> None:
    site = replace(config.site, env={"HF_TOKEN": "typed-here"}, setup=[f"login --token {TOKEN}"])
    tracking = replace(config.tracking, uri="http://me:typed@host:5000")
    with pytest.raises(ConfigError) as caught:
        validate(replace(config, site=site, tracking=tracking))
    told = str(caught.value).splitlines()
    assert len(told) == 3
    assert "site.env.HF_TOKEN would be written into the job's script: export HF_TOKEN" in told[1]
    assert "site.setup[0] holds the value of MY_API_TOKEN" in told[2]
    assert "tracking.uri=http://me:***@host:5000 holds a password or token" in told[0]
    assert "typed" not in str(caught.value)


def test_a_name_cannot_be_a_reference(config: Config, tmp_path: Path) -> None:
    tracking = replace(config.tracking, experiment=TOKEN)
    there = tmp_path / TOKEN
    given = {"name": f"x-{TOKEN}", "output_dir": str(there), "tracking": tracking}
    with pytest.raises(ConfigError) as caught:
        validate(replace(config, **given))
    why = "holds the value of MY_API_TOKEN, which would stand in the name of a folder, a job or"
    told = str(caught.value)
    assert [f"{key} {why}" in told for key in ("name", "output_dir", "tracking.experiment")] == (
        [True] * 3
    )
    assert TOKEN not in told
    there.mkdir()  # nothing more is said by it
    validate(replace(config, output_dir=str(there)))


def test_env_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SECRET", "short")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"/logs/{TOKEN}")
    monkeypatch.setenv("MY_API_TOKEN", TOKEN)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")  # AMD's names of what a job may see
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    shown = json.loads(run_module("hpctrain", "doctor", "--env", "--json").stdout)["environment"]
    assert (shown["NCCL_SECRET"], shown["NCCL_DEBUG_FILE"]) == ("***", "/logs/***")
    assert (shown["ROCR_VISIBLE_DEVICES"], shown["HIP_VISIBLE_DEVICES"]) == ("0,1", "0")


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
    without = (f"~model.{key}" for key in ("in_features", "hidden", "out_features", "dropout"))
    own = ("model._target_=told.Model", f"+model.token={token}", f"+model.end={end}")
    size = ("train.max_steps=2", "launch.snapshot=off", "tracking.drain_s=60")
    return ("model=mlp", *without, *own, *size)


def uploaded_runs(store: Path) -> int:
    with closing(sqlite3.connect(store)) as uploaded:
        return int(uploaded.execute("SELECT count(*) FROM runs").fetchone()[0])


def assert_nowhere(folder: Path, *said: str) -> None:
    found = subprocess.run(["grep", "-rla", TOKEN, str(folder)], capture_output=True, text=True)
    assert found.stdout == ""
    assert not [text for text in said if TOKEN in text]


def test_a_training_leaves_no_trace_of_it(
    train: Train,
    tmp_path: Path,
    told: dict[str, str],
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = train(*model("${oc.env:MY_API_TOKEN}", "finish"), **told)
    assert "logging in with ***" in done.stderr
    assert "KeyError: '***'" in done.stderr
    (run,) = runs(tmp_path / "runs")
    log = (run / "logs" / "terminal_1.rank0.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert uploaded_runs(store) == 1
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("MY_API_TOKEN", TOKEN)
    capsys.readouterr()
    assert export([str(run), str(tmp_path / "out")]) == 0
    assert_nowhere(tmp_path, done.stdout, done.stderr, *capsys.readouterr())


@pytest.mark.slow
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
    assert uploaded_runs(store) == 1
    assert_nowhere(tmp_path / "runs", failed.stdout, failed.stderr)


@pytest.mark.usefixtures("environment")
def test_a_page_holds_no_secret() -> None:
    page = html_view.page(f"run \x1b[8m\u202e {TOKEN}", [Sentences("", "", ["<b>text"])])
    assert "<h1>run \\x1b[8m\\u202e ***</h1>" in page
    assert "&lt;b&gt;text" in page
