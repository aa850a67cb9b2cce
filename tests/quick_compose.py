"""The configs of the forks of tests/forkserver.py, which are composed as those of a sweep.

    test process ── `hpctrain experiment=digits seed=1` ──► server: composes experiment=digits, once
                                                              │ fork
                                                              └► the fork writes seed=1 into it

Hydra takes as long for a config as a short training on the digits takes for all the rest. The runs
of a sweep have Hydra's result in a tenth of the time (tests/launch/test_sweep.py compares them),
because what depends only on the choices of files is composed once. A server does so for its forks.

Hydra itself composes what this refuses, so that each error is the one of a new process, and all
that is neither KEY=VALUE nor --config-dir: `-m`, other flags, its own keys, values of a sweep.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.utils import setup_globals
from hydra.types import RunMode

from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.config.composing import compose as by_hydra
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config

_PLAIN = re.compile(r"(?:[+]{0,2}[\w./@-]+=|~[\w./-]+).*", re.S)
_SWEPT = re.compile(r"[^=]*=[^\[{'\"]*[,(].*", re.S)
_Files = tuple[
    tuple[str, int], ...
]  # of a folder of configs: each path with the time of its change


class QuickCompose:
    """Composes configs in a server, and in its forks."""

    def __init__(self) -> None:
        setup_globals()  # the resolver `now`
        self._composers: dict[tuple[str, _Files], Composer] = {}
        self._hydra: Callable[[list[str]], Config | None] = by_hydra.compose
        # Hydra finds its plugins and warms its parser here, which each fork would do again.
        with by_hydra.our_files():
            self._composer("")

    def prepare(self, words: Sequence[str], cwd: str) -> None:
        """Compose, in the server, the choices of a command that is about to be forked."""
        given = [*words[words.index("hpctrain") + 1 :]] if "hpctrain" in words else []
        if given and (read := _read(given, cwd)):
            with suppress(Exception), by_hydra.our_files():
                self._composer(read[0])(read[1])

    def install(self) -> None:
        """Compose quickly in this process from now on."""
        by_hydra.compose = self.compose

    def compose(self, argv: list[str]) -> Config | None:
        """Do what `hpctrain.config.composing.compose.compose` does."""
        if read := _read(argv, os.getcwd()):
            with suppress(Exception), by_hydra.our_files():
                composer = self._composer(read[0])
                config = composer.typed([by_hydra.extending(text) for text in read[1]])
                if not composer.notes:  # files set keys of the launcher, which only `-m` reads
                    return config
        return self._hydra(argv)

    def _composer(self, folder: str) -> Composer:
        """Return the composer for a folder of configs with its present files; "" is none."""
        files = Path(folder).rglob("*.yaml") if folder else ()
        key = (folder, tuple(sorted((str(path), path.stat().st_mtime_ns) for path in files)))
        if key not in self._composers:
            path = create_config_search_path(str(conf_dir()))
            if folder:
                query = SearchPathQuery(provider="schema")
                path.prepend("command-line", f"file://{folder}", query)
            loader = ConfigLoaderImpl(path)
            master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
            self._composers[key] = Composer(loader, master)
        return self._composers[key]


def _read(words: Sequence[str], cwd: str) -> tuple[str, list[str]] | None:
    """Return the folder of --config-dir, or "", and the overrides; None leaves it to Hydra."""
    overrides, folder = [*words], ""
    if "--config-dir" in overrides[:-1]:
        at = overrides.index("--config-dir")
        folder = os.path.join(cwd, overrides[at + 1])
        del overrides[at : at + 2]
        if not os.path.isdir(folder):
            return None
    plain = all(
        _PLAIN.fullmatch(word)
        and not _SWEPT.fullmatch(word)
        and not word.lstrip("+~").startswith("hydra")
        for word in overrides
    )
    return (folder, overrides) if plain and overrides else None
