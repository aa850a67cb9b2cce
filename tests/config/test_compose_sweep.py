"""The runs of a sweep are composed fast, with the result of composing each alone."""

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.types import RunMode

from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.config.composing.compose import our_files
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def new() -> Any:
    """A function that makes a composer that has not composed anything yet."""
    with our_files():
        loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
        master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
        yield lambda: Composer(loader, master)


@pytest.fixture
def alone(new: Any) -> Any:
    """A function that composes a run as if it were the only one."""
    return lambda overrides: outcome(new(), overrides)


DIGITS = ["experiment=digits"]


# For each sweep: what all runs have, a key, and its values.
SWEEPS = {
    "integers": ([], "seed", ["0", "1", "30"]),
    "floats": (["+site.sbatch.hold=true"], "optimizer.lr", ["0.1", "1e-3", "1"]),
    "a choice": (["optimizer=sgd"], "data.shuffle", ["full", "'full'", "none"]),
    "a text like a number": ([], "name", ["1", "1e3", "true", "x y"]),
    "a free section": ([], "model.dropout", ["0", "0.5", "some"]),
    "resolved anew": (["parallel=hsdp"], "launch.tasks_per_node", ["1", "2"]),
    "a section resolved": (["+model.more=${data}"], "data.window", ["1", "2"]),
    "an interpolation": ([], "model.x", ["${seed}", "1"]),
    "lists": ([], "model.hidden", ["[8]", "[16]"]),
    "a choice of a group": (["seed=1"], "optimizer", ["sgd", "adamw", "sgd"]),
    "the same key twice": (["seed=5"], "seed", ["1", "2"]),
    "a key of a changed section": (["model={hidden: 3, a: 1}"], "model.hidden", ["4", "5"]),
    "the launcher": ([], "hydra.launcher.timeout_min", ["3", "4"]),
}


def outcome(composer: Composer, overrides: list[str]) -> Config | str:
    """Return the config of a run, or its error."""
    try:
        return composer.typed(overrides)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_each_run_is_as_if_it_were_composed_alone(new: Any, alone: Any, sweep: str) -> None:
    given, key, values = SWEEPS[sweep]
    composer = new()
    for overrides in ([*DIGITS, *given, f"{key}={value}"] for value in values):
        config = outcome(composer, overrides)
        assert repr(config) == repr(alone(overrides))  # 1, 1.0 and True are equal, not the same
        if isinstance(config, Config):
            config.model["changed"] = True  # the change must not reach the other runs
            config.train.max_steps = 77
    assert composer.notes == {} or sweep == "the launcher"


@pytest.mark.parametrize(
    "wrong", ["seed=1.5", "seed=a", "optimizer.lr=b", "train.from_scratch=abc"]
)
def test_an_error_is_as_if_the_run_were_alone(new: Any, alone: Any, wrong: str) -> None:
    key = wrong.partition("=")[0]
    valid = {"train.from_scratch": ("true", "false")}.get(key, ("1", "2"))
    composer = new()
    for value in valid:
        composer.typed([*DIGITS, "data.path=/d", f"{key}={value}"])
    line = [*DIGITS, "data.path=/d", wrong]
    message = outcome(composer, line)
    assert message == alone(line)
    assert isinstance(message, str)
    assert key in message
    good = composer.typed([*DIGITS, "data.path=/d", f"{key}={valid[0]}"])
    assert repr(good) == repr(alone([*DIGITS, "data.path=/d", f"{key}={valid[0]}"]))


def test_a_missing_value_is_named_in_each_run(new: Any) -> None:
    composer = new()
    for seed in range(3):
        with pytest.raises(ConfigError, match=r"data\.path is missing"):
            composer.typed([f"seed={seed}"])
