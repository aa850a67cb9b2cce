"""Configs are composed, checked before anything is written, and read back unchanged."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.base.files.yaml_file import conf_dir, groups
from hpctrain.config.composing.compose import compose as compose_config
from hpctrain.config.composing.compose import extending
from hpctrain.config.composing.compose_sweep import Composer, composed
from hpctrain.config.frozen import dump, load
from hpctrain.config.identity import identity
from hpctrain.config.job_request import fitting_nodes
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError, DataError, HpctrainError
from hpctrain.insight.reference.help import as_typed
from hpctrain.runs.freeze import check, freeze
from tests.written import write_shards

Compose = Callable[..., Config]
MINE = "# @package _global_\ndefaults:\n  - digits\n"  # of a file in experiment/


@pytest.fixture
def compose(digits: Path, tmp_path: Path) -> Compose:
    def call(*arguments: str) -> Config:
        config = compose_config([f"data.path={digits}", f"output_dir={tmp_path}/runs", *arguments])
        assert config is not None
        return config

    return call


def test_the_experiment_composes_to_typed_values(compose: Compose, tmp_path: Path) -> None:
    config = compose("experiment=digits", "optimizer.lr=2e-3")
    validate(config)
    assert config.optimizer.lr == 0.002
    assert config.model["_target_"] == "hpctrain.models.MLP"
    assert config.tracking.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_hydra_gives_the_job_the_same_name_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    """Files of users may have ${hydra.job.name}, as those of submitit's launcher do."""
    assert compose_config(["--cfg", "hydra", "--package", "hydra.job"]) is None
    assert "\nname: compose\n" in capsys.readouterr().out


def test_hydra_composes_once_and_a_file_may_ask_for_a_sweep(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, own = list[object](), ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_configuration", lambda *a, **k: loads.append(a) or own(*a, **k)
    )
    compose("experiment=digits")
    assert len(loads) == 1
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    file.write_text(f"{MINE}hydra: {{mode: MULTIRUN}}\n")
    with pytest.raises(ConfigError, match="hydra/launcher: -m needs hpctrain"):
        compose(
            *(f"--config-dir={tmp_path}", "experiment=mine", "hydra/launcher=basic", "seed=1,2"),
            f"hydra.sweep.dir={tmp_path}",
        )


def test_the_variable_of_mlflow_names_the_store(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert compose("experiment=digits").tracking.uri == "http://tracking:5000"
    own = "tracking.uri=sqlite:////x/mlflow.db"
    assert compose("experiment=digits", own).tracking.uri == "sqlite:////x/mlflow.db"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hydra.sweeper.n_job=1", "unknown key hydra.sweeper.n_job: `--cfg hydra` shows"),
        ("name=über", "quote what is no plain word"),
        ("--nothing", "unrecognized arguments: --nothing; --help shows"),
        ("--watch", "unrecognized arguments: --watch; write train.watch=VALUE; --help shows"),
        ("--experiment=digits", "--experiment=digits; write experiment=digits; --help shows"),
        ("-seed=1", "unrecognized arguments: -seed=1; write seed=1; --help shows"),
        ("--lr=1", "unrecognized arguments: --lr=1; write optimizer.lr=1; --help shows"),
        ("train.lora.rank=16", "train.lora.rank=16 needs train.lora.match"),  # as plan composes
        ("model=null", "Config group override must be"),
        ("seed=1,2", "seed=1,2: these are several values; add -m for one run with each of them"),
        ("optimizer.lr=[", "optimizer.lr=[: not of the form KEY=VALUE"),
    ],
)
def test_bad_argument(compose: Compose, argument: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HpctrainError) as caught:
        check(compose("experiment=digits", argument))
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key optimizer.lrr: did you mean optimizer.lr"),
        (
            "model.hiden=1",
            "unknown key model.hiden: did you mean model.hidden? hpctrain.models.MLP has in_",
        ),
        ("lr=1", "unknown key lr: did you mean optimizer.lr? the top level has"),
        ("launch.partition=a", "unknown key launch.partition: did you mean site.partition? launch"),
        # The names of other tools.
        ("accumulate_grad_batches=4", "accumulate_grad_batches: did you mean train.accumulate?"),
        ("+train.learning_rate=1", "unknown key train.learning_rate: did you mean optimizer.lr?"),
        ("fast_dev_run=true", "unknown key fast_dev_run: did you mean debug=fast?"),
        ("launch.nodes=two", "launch.nodes='two': it must be a number of nodes, such as 4, or a"),
        ("launch.nodes=0-2", "launch.nodes='0-2': it must be at least 1"),
        ("launch.nodes=8-4", "launch.nodes='8-4': a range begins with the smaller number: 4-8"),
        ("launch.nodes=1-99999", "launch.nodes='1-99999': a range has at most 10000 numbers"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: it must be greater than 0"),
        (
            "optimizer.lr_scaling=sqrt",
            "optimizer.lr_scaling=sqrt needs optimizer.base_batch_size: the global batch size for "
            "which optimizer.lr was chosen",
        ),
        (
            "train.lora.match=head",
            "train.lora.match=head needs checkpoint.init_from: the weights that the adapters are",
        ),
        (
            "scheduler.warmup_epochs=1",
            "scheduler.warmup_steps=20 with scheduler.warmup_epochs=1: give one length of the "
            "warm-up and set the others to 0",
        ),
        ("optimizer.lr=nan", "optimizer.lr=nan: it must be greater than 0"),
        ("experiment=none_such", "experiment=none_such: no such choice; there are: digits"),
        ("precision.params=bf16", "precision.params=bf16 with precision.compute=fp32: numbers in"),
        ("data.tail=cut", "data.tail=cut: allowed are drop, pad"),
        (
            "train.max_epochs=null",
            "train.max_epochs=null with train.max_steps=null: give one of them",
        ),
        ("name=a/b", "name='a/b': letters, digits"),
        ("model._target_=MLP", "model._target_=MLP: choose one with model=NAME"),
        ("model.hidden=256", "hpctrain.models.MLP takes hidden: Sequence[int], such as [256]"),
        ("~model.hidden", "model.hidden is missing: hpctrain.models.MLP needs it"),
        ("task.target=lable", "task.target=lable: did you mean label? the samples have image, la"),
        ("metric=val/acc", "metric=val/acc: did you mean val/accuracy? this run produces train/"),
        (
            "data.val_split=test",
            "there is no split 'test'; this data set has train, val; choose one of them, or train "
            "without evaluation: data.val_split=null",
        ),
        ("parallel.dp_shard=3", "dp_replicate -1 x dp_shard 3 x cp 1 x tp 1 x pp 1, but"),
        ("train.global_batch_size=100000", "train.global_batch_size=100000, but the split 'train'"),
        ("data.train_split=trian", "data.train_split=trian: /"),
        ("tracking.uri=file:///x", "tracking.uri"),
        ("network.infiniband='a b'", "network.infiniband='a b': auto, none, or devices such as"),
        ("launch.warn_s=3600", "launch.warn_s=3600 seconds is not below launch.time_min=60"),
        (
            "launch.nodes=2; launch.tasks_per_node=3",
            "train.global_batch_size=64 is not divisible by dp 6 x train.accumulate 1 = 6: use 60 "
            "or 66",
        ),
        (
            "network.debug=WARN; +site.env.NCCL_DEBUG=INFO",
            "network.debug and site.env.NCCL_DEBUG set the same variable: give one of them",
        ),
        ("site.container.runtime=pyxis", "args=[]: give the image, or args that name"),
        (
            "site.container.runtime=command; site.container.image=i",
            "with site.container.image=i: say it in args",
        ),
        ("launch.nodes=1-2; launch.spares=1", "launch.spares=1 with launch.nodes=1-2: a job"),
        (
            "site.modules=[gcc/12]; site.setup=[module --force purge]",
            "such as site.modules=[purge, gcc/12]",
        ),
        (
            "monitor.every_s=30; monitor.idle_minutes=1",
            "monitor.idle_minutes=1.0 with monitor.every_s=30.0: a shorter time than 3 samples "
            "says nothing; at least 1.5 minutes",
        ),
    ],
)
def test_bad_value(
    composer: Composer, digits: Path, tmp_path: Path, override: str, message: str
) -> None:
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    with pytest.raises(HpctrainError) as caught:
        check(composer.typed(["experiment=digits", *where, *override.split("; ")]))
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_options_of_another_optimizer_are_removed_as_the_error_says(composer: Composer) -> None:
    line = ["experiment=stdlib_lm", "data.path=/d", "output_dir=/r", "optimizer=sgd"]
    with pytest.raises(ConfigError) as caught:
        validate(composer.typed(line))
    found = re.findall(r"'(~\S+)' removes it", str(caught.value))
    assert found == ["~optimizer.options.betas"]
    validate(composer.typed([*line, *found]))


def test_a_plan_on_the_command_line(compose: Compose) -> None:
    text = "parallel.plan={layers.*.up: colwise, layers.*.down: rowwise}"
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    assert compose("experiment=digits", text, "seed=1").parallel.plan == plan
    line = ["experiment=digits", "data.path=/d", "output_dir=/r", text, "seed=1,2"]
    with composed(line, None) as call:
        assert [call.composer.typed(run).parallel.plan for run in call.runs] == [plan, plan]
    for other in ("model={a: 1}", "parallel.plan=x", "train={a: 1}", "+parallel.plan={a: rowwise}"):
        assert extending(other) == other


def test_a_split_that_stayed_empty(composer: Composer, tmp_path: Path) -> None:
    """The way out is not the option that has left it empty."""
    folder = tmp_path / "set"
    write_shards(folder, [("train", {"x": np.arange(3)})])
    where = [f"data.path={folder}", f"output_dir={tmp_path}/runs"]
    config = composer.typed(["experiment=digits", "task.input=x", "task.target=x", *where])
    write = "write it with `--split train=0.9,val=0.1` of data_prep, or train without evaluation"
    with pytest.raises(DataError) as caught:
        check(config)
    missing = f"data.val_split=val: {folder}: there is no split 'val'; this data set has train"
    assert str(caught.value) == f"{missing}; {write}: data.val_split=null"


def test_a_file_and_the_command_line_say_the_same(compose: Compose, tmp_path: Path) -> None:
    """A folder of --config-dir; its text keys, also in lists and mappings, and its minutes."""
    for folder in ("experiment", "site"):
        (tmp_path / folder).mkdir()
    experiment = tmp_path / "experiment" / "mine.yaml"
    experiment.write_text(
        "# @package _global_\ndefaults: [digits, {override /site: mine}]\n"
        "name: 1.10\nlaunch: {time_min: 90}\ntracking: {drain_s: 3}\n"
    )
    (tmp_path / "site" / "mine.yaml").write_text(
        "modules: [3.10, on]\nenv: {A: 010, NO: yes}\naccount: 0123\n"
    )
    where = ("--config-dir", str(tmp_path))
    config = compose("experiment=mine", *where)
    typed = compose(
        *("experiment=digits", "name=1.10", "launch.time_min=90", "tracking.drain_s=3"),
        *("site.modules=[3.10,on]", "+site.env.A=010", "+site.env.NO=yes", "site.account=0123"),
    )
    assert (config.name, config.tracking.drain_s, config.launch.time_min) == ("1.10", 3, 90)
    assert (config.site.modules, config.site.account) == (["3.10", "on"], "0123")
    assert config.site.env == typed.site.env == {"A": "010", "NO": "yes"}
    assert dump(config) == dump(typed)
    experiment.write_text("# @package _global_\nlaunch:\n  time_min: 12:00:00\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: line 3: 12:00:00: programs read this"):
        compose("experiment=mine", *where)
    for wrong in ("train.max_steps=010", "seed=1,010"):
        with pytest.raises(ConfigError, match="write the number 010 in plain decimal digits"):
            compose("experiment=digits", wrong)


def test_a_sweep_of_texts_stays_what_was_written() -> None:
    with composed(["experiment=digits", "name=1e3,1.10,x"], None) as call:
        names = [call.composer.typed(run).name for run in call.runs]
    assert names == ["1e3", "1.10", "x"]


@pytest.mark.parametrize(
    ("overrides", "fitting"),
    [
        (["launch.nodes=3"], None),
        (["launch.nodes=3-9"], [4, 8]),
        (["launch.nodes=1-4", "launch.tasks_per_node=2", "parallel.dp_shard=4"], [2, 4]),
        (["launch.nodes=1-4", "train.micro_batch_size=16"], [1, 2, 4]),
        (["launch.nodes=5-7"], None),
        (["launch.nodes=4", "parallel.dp_replicate=1", "parallel.dp_shard=-1"], [4]),
    ],
)
def test_a_range_of_nodes_has_a_number_that_fits(
    composer: Composer, overrides: list[str], fitting: list[int] | None
) -> None:
    config = composer.typed(["experiment=digits", "data.path=/d", "output_dir=/r", *overrides])
    if fitting is not None:
        validate(config)
        assert fitting_nodes(config) == fitting
        return
    with pytest.raises(ConfigError) as caught:
        validate(config)
    if "-" in overrides[0]:
        assert "launch.nodes=5-7: no number of nodes in this range fits (5 nodes: train.global" in (
            str(caught.value)
        )
        assert "and so on up to 7 nodes): use launch.nodes=4 or launch.nodes=8" in str(caught.value)


def test_what_is_wrong_for_every_number_of_nodes_is_said_once(compose: Compose) -> None:
    config = compose("experiment=digits", "launch.nodes=1-4", "parallel.sync=every")
    config.parallel.zero, config.parallel.dp_shard = 1, -1
    config.parallel.dp_replicate = 1
    config.parallel.fsdp.offload = True
    with pytest.raises(ConfigError) as caught:
        validate(config)
    said = "parallel.sync=every with parallel.zero=1 and parallel.fsdp.offload=true: that is"
    (line,) = (line for line in str(caught.value).splitlines() if "offload" in line)
    assert line == f"{said} parallel.zero=2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: a: b", r"mine\.yaml: line 1: it is not YAML \(mapping values are not allowed"),
        ("defaults: [{override /model: mlp}]", "experiment/mine.yaml: its first line must be `# @"),
        (
            "name: mine",
            "if it comes from a file in experiment/, its first line must be `# @package",
        ),
        *(
            (f"{MINE}  - _self_\n{section}", rf"mine\.yaml: {message}")
            for section, message in {
                "precision: bf16": "precision: bf16: precision has keys of its own; the value "
                "belongs to one of them, such as precision.compute; the choice of a file is "
                "written `- override /precision: bf16` below `defaults`",
                "model: mlp": "model: mlp: .*`- override /model: mlp` below `defaults`",
                "train:": "train: null: .* one of them, such as train.global_batch_size",
                "site: {env: x}": "site.env: x: .* one of them, such as site.env.KEY",
            }.items()
        ),
        *(
            (f"{MINE}  - {choice}", f"{file}its choice of precision is written `- override /prec")
            for choice, file in {
                "precision: bf16": r"experiment/mine\.yaml: ",
                "override precision: bf16": r"experiment/mine\.yaml: ",
                "/precision: bf16": "",
            }.items()
        ),
    ],
)
def test_what_is_wrong_in_a_file_of_the_user_is_said_without_a_traceback(
    compose: Compose, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        compose("experiment=mine", "--config-dir", str(tmp_path))


def test_a_choice_that_is_in_a_folder_here_is_named_with_its_option(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "site").mkdir(parents=True)
    (tmp_path / "mine" / "site" / "juno.yaml").touch()
    with pytest.raises(ConfigError, match=r"; --config-dir mine adds mine/site/juno\.yaml$"):
        compose("experiment=digits", "site=juno")


def test_a_key_of_a_section_without_a_target(compose: Compose) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key model.a: model has no _target_ yet; choose"
    ):
        compose("model.a=1")


def test_all_that_is_wrong_is_said_at_once(compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(compose("experiment=digits", "seed=-1", "optimizer.lr=0", "data.threads=-2"))
    assert len(str(caught.value).splitlines()) == 3


def test_without_an_experiment_the_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        compose_config(["train.max_steps=1"])


def test_signature_ignores_how_and_where(composer: Composer, digits: Path, tmp_path: Path) -> None:
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]

    def name(*overrides: str) -> str:
        return check(composer.typed([*where, *overrides])).name

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in digits.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    same = {
        name(),
        name("launch.nodes=2"),
        name("tracking=off", "train.log_every=7", "checkpoint.keep=5"),
        name(f"data.path={copy}"),
    }
    assert len(same) == 1
    assert len({name(), name("seed=1"), name("optimizer.lr=1"), name("model.hidden=[8]")}) == 4
    # A default value that is given on the command line does not change the name.
    assert name("data.window=64", "scheduler=cosine", "precision=fp32", "optimizer=adamw") == name()
    assert name("train.accumulate=4", "data.prefetch_mb=1", "data.workers=0") == name()


def test_frozen_config_reads_back_the_same(compose: Compose) -> None:
    config = compose("experiment=digits", "model.hidden=[3,4]", "+site.env.A='x y'")
    run = check(config)
    freeze(config, run)
    again = load(run.config_file)
    assert again == config
    assert identity(again, "d") == identity(config, "d")


@pytest.mark.slow
def test_every_choice_of_conf_fits_the_schema(composer: Composer) -> None:
    where = ["data.path=/data", "output_dir=/runs"]
    found = groups(conf_dir())
    # One config takes a choice of each group, because composing one takes a tenth of a second.
    for row in range(max(map(len, found.values()))):
        chosen = [f"{as_typed(each)}={names[row % len(names)]}" for each, names in found.items()]
        assert composer.typed([*chosen, *where]).name
    others = [choice for choice in chosen if not choice.startswith("experiment=")]
    assert composer.typed([*others, *where]).name


HOSTILE = ["1e-3", "0x1f", "nan", "${oc.env:HOME}", "\\\\${x}", "yes", "null", "a: b", "\n", " "]


# Few dictionaries of many values, because it takes a tenth of a second to read a config.
@settings(max_examples=5, deadline=None)
@example({"\\${": ""})
# Hydra's `???` is a value that is still missing, so no config that was composed has it.
@given(
    st.dictionaries(
        st.text(),
        st.one_of(st.text(), st.sampled_from(HOSTILE), st.floats(-1, 1)).filter(
            lambda value: value != "???"
        ),
        min_size=4,
    )
)
def test_a_frozen_config_reads_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, object]
) -> None:
    config = Config(seed=3, model=options)
    config.data.path = config.output_dir = "/x"
    config.tracking.uri = "http://x"
    file = tmp_path_factory.mktemp("frozen") / "config.yaml"
    file.write_text(dump(config))
    assert load(file) == config
