"""The runs of a sweep are composed and written fast, with the result of composing each alone."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.types import RunMode

from hpctrain.config import frozen
from hpctrain.config.composing.compose import store_schema
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.yaml_file import conf_dir


@pytest.fixture(scope="module")
def new() -> Any:
    """A function that makes a composer that has not composed anything yet."""
    store_schema()
    loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
    master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
    return lambda kind=Composer: kind(loader, master)


class Alone(Composer):
    """Composes every run as if it were the only one."""

    def _template(self, *_: Any) -> None:
        return None


@pytest.fixture(scope="module")
def alone(new: Any) -> Any:
    return new(Alone)


DIGITS = ["experiment=digits"]


def spread(given: list[str], key: str, values: list[str]) -> Iterator[list[str]]:
    """Yield the overrides of the runs; the first two are of the kind of the third."""
    yield from ([*DIGITS, *given, f"{key}={value}"] for value in values)


# For each sweep: what all runs have, a key, its values, and how many runs Hydra has to compose.
SWEEPS = {
    "integers": ([], "seed", ["0", "1", "2", "30"], 2),
    "floats": (["+site.sbatch.hold=true"], "optimizer.lr", ["0.1", "1e-3", "1", "0.30"], 2),
    "a truth value": ([], "train.from_scratch", ["true", "false", "True", "false"], 2),
    "a choice": (["optimizer=sgd"], "data.shuffle", ["full", "block", "'full'", "none"], 2),
    "a text like a number": ([], "name", ["1", "1e3", "true", "x y"], 2),
    "a text with signs": ([], "tracking.experiment", ["'a: b'", "'#c'", "ü", "'\"'"], 2),
    "a free section": ([], "model.dropout", ["0", "0.5", "1", "some"], 2),
    "resolved anew": (["parallel=hsdp"], "launch.tasks_per_node", ["1", "2", "3", "4"], 2),
    "a section resolved": (["+model.more=${data}"], "data.window", ["1", "2", "3", "4"], 2),
    "a path": (["metric=${output_dir}"], "data.path", ["a", "~/b", "/c", "s3://d"], 2),
    "the folder of the store": (["data.path=/d"], "output_dir", ["/a", "~/b", "c", "/d"], 2),
    "null": ([], "train.clip_norm", ["1.5", "null", "2.5", "null", "3.5"], 4),
    "an interpolation": ([], "model.x", ["${seed}", "${seed}", "1", "2"], 0),
    "lists": ([], "model.hidden", ["[8]", "[16]", "[32]", "[8]"], 4),
    "a choice of a group": (["seed=1"], "optimizer", ["sgd", "adamw", "sgd", "sgd"], 3),
    "the same key twice": (["seed=5"], "seed", ["1", "2", "3", "4"], 4),
    "a key of a changed section": (
        ["model={hidden: 3, a: 1}"],
        "model.hidden",
        ["4", "5", "6", "7"],
        4,
    ),
    "the launcher": ([], "hydra.launcher.timeout_min", ["3", "4", "5"], 3),
}


def outcome(composer: Composer, overrides: list[str]) -> Config | str:
    """Return the config of a run, or its error."""
    try:
        return composer.typed(overrides)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_each_run_is_as_if_it_were_composed_alone(
    new: Any, alone: Composer, monkeypatch: pytest.MonkeyPatch, sweep: str
) -> None:
    given, key, values, by_hydra = SWEEPS[sweep]
    composer, composed = new(), 0
    compose = composer.__class__.__call__

    def counted(self: Composer, overrides: list[str]) -> Any:
        nonlocal composed
        composed += self is composer
        return compose(self, overrides)

    monkeypatch.setattr(Composer, "__call__", counted)
    for overrides in spread(given, key, values):
        expected = outcome(alone, overrides)
        config = outcome(composer, overrides)
        assert repr(config) == repr(expected)  # 1, 1.0 and True are equal, but not the same
        if isinstance(config, str) or isinstance(expected, str):
            continue
        assert frozen.dump(config) == whole(expected)
        config.model["changed"] = True  # the change must not reach the other runs
        config.train.max_steps = 77
    assert composed == (by_hydra or len(values))
    assert composer.notes == {} or sweep == "the launcher"


@pytest.mark.parametrize(
    "wrong", ["seed=1.5", "seed=a", "optimizer.lr=b", "train.from_scratch=abc"]
)
def test_an_error_is_as_if_the_run_were_alone(new: Any, alone: Composer, wrong: str) -> None:
    key = wrong.partition("=")[0]
    valid = {"train.from_scratch": ("true", "false")}.get(key, ("1", "2"))
    composer = new()
    for value in valid:
        composer.typed([*DIGITS, "data.path=/d", f"{key}={value}"])
    messages = [outcome(each, [*DIGITS, "data.path=/d", wrong]) for each in (composer, alone)]
    assert messages[0] == messages[1]
    assert isinstance(messages[0], str)
    assert key in messages[0]
    good = composer.typed([*DIGITS, "data.path=/d", f"{key}={valid[0]}"])
    assert repr(good) == repr(alone.typed([*DIGITS, "data.path=/d", f"{key}={valid[0]}"]))


def test_a_missing_value_is_named_in_each_run(new: Any) -> None:
    composer = new()
    for seed in range(3):
        with pytest.raises(ConfigError, match=r"data\.path is missing"):
            composer.typed([f"seed={seed}"])


def whole(config: Config) -> str:
    """Return the YAML of a config, written as one document."""
    text: str = yaml.dump(
        frozen.plain(config), Dumper=frozen._Dumper, sort_keys=False, allow_unicode=True
    )
    return text


def test_lines_that_runs_share_are_those_of_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    values: list[Any] = [
        *("", "x" * 200, "words " * 40, "two\nlines\n", " edge ", "ü\u2028", "null", "- a", "1e3"),
        *("${a}", "secret-token-1", "a\\${b}", "#", "yes", "'", '"', "k: v", "\t"),
        *(0, 0.0, False, 1, 1.0, True, -0.0, 1e-7, float("inf"), None, [], {}),
        *([1, [2, {"a": []}], {}], {"x y": {"1": "words " * 30}}, {1: 2, 2.5: 3}, ["a" * 90] * 2),
    ]
    for value in values:
        config.model = {"value": value, "inner": {"value": value, "list": [value]}}
        config.data.path, config.name = deepcopy(value), deepcopy(value)
        config.site.env = {"A": deepcopy(value)}
        assert frozen.dump(config) == whole(config), value
    monkeypatch.setenv("MY_TOKEN", "secret-token-1")  # the lines with it were kept before
    config.name = "secret-token-1"
    assert frozen.dump(config) == whole(config)
    assert "secret" not in frozen.dump(config)


def test_only_the_lines_that_differ_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen.dump(Config())
    written = []
    dump = yaml.dump
    monkeypatch.setattr(yaml, "dump", lambda node, **kw: written.append(node) or dump(node, **kw))
    config = Config(seed=123456)
    config.optimizer.lr = 0.123456
    assert frozen.dump(config) == frozen.dump(config)
    assert written == [{"seed": 123456}, {"optimizer": {"lr": 0.123456}}]
