"""From the command line to the typed config: Hydra composes, and does nothing else."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.choices import conf_dir
from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, StorageError


def compose(argv: list[str]) -> Config | None:
    """Let Hydra read the command line.

    Args:
        argv: without the program's name.

    Returns:
        The typed config; None when Hydra did something else (`-m`, `--cfg`).

    Raises:
        ConfigError: a key, value or choice is wrong.
        StorageError: the folder of a sweep cannot be written.
    """
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # Hydra 1.4 warns of a second time
        store.store(name="schema", node=Config)
    # Hydra 1.4 warns of the parameter, 1.3 of its absence.
    base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    composed: list[DictConfig] = []
    typed = sys.argv
    overrides = _overrides(argv)
    # Hydra's own report of an error is long and exits with 1: ours replaces it.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra 1.3 takes overrides in one go only: `experiment=digits -m seed=1,2` is fine here.
    sys.argv = [typed[0], *(text for text in argv if text not in overrides), *overrides]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", **base)(composed.append)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, known_keys())) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise StorageError(
            f"output_dir: cannot write {error.filename} ({error.strerror})"
        ) from error
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        sys.argv = typed
    return from_omegaconf(composed[0]) if composed else None


def _overrides(argv: list[str]) -> list[str]:
    """What is neither a flag of Hydra's nor the value of one; flags it lacks are refused."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what there is, --hydra-help Hydra's own")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    overrides: list[str] = parser.parse_intermixed_args(argv).overrides
    return overrides
