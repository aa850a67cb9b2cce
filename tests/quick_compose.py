"""The configs of the forks of tests/forkserver.py, which are composed as those of a sweep.

    test process ── `hpctrain experiment=digits seed=1` ──► server: composes experiment=digits, once
                                                              │ fork
                                                              └► the fork writes seed=1 into it

Hydra takes as long for a config as a short training on the digits takes for all the rest. The runs
of a sweep have Hydra's result in a tenth of the time (tests/launch/test_sweep.py compares them),
because what depends only on the choices of files is composed once. A server does so for its forks.

Hydra itself composes what this refuses, so that each error is the one of a new process, and all
that is no plain KEY=VALUE: `-m`, flags such as `--config-dir`, its own keys, values of a sweep.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.utils import setup_globals
from hydra.types import RunMode

from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.config.composing import compose as by_hydra
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config

_PLAIN = re.compile(r"(?:[+]{0,2}[\w./@-]+=|~[\w./-]+).*", re.S)
_SWEPT = re.compile(r"[^=]*=[^\[{'\"]*[,(].*", re.S)


class QuickCompose:
    """Composes configs in a server, and in its forks."""

    def __init__(self) -> None:
        setup_globals()  # the resolver `now`
        by_hydra.store_schema()
        # Hydra finds its plugins and warms its parser here, which each fork would do again.
        with by_hydra.our_launchers():
            loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
            master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
        self._composer = Composer(loader, master)
        self._hydra: Callable[[list[str]], Config | None] = by_hydra.compose

    def prepare(self, words: Sequence[str]) -> None:
        """Compose, in the server, the choices of a command that is about to be forked."""
        given = [*words[words.index("hpctrain") + 1 :]] if "hpctrain" in words else []
        if given and _plain(given):
            with suppress(Exception), by_hydra.our_launchers():
                self._composer(given)

    def install(self) -> None:
        """Compose quickly in this process from now on."""
        by_hydra.compose = self._compose

    def _compose(self, argv: list[str]) -> Config | None:
        if _plain(argv):
            with suppress(Exception), by_hydra.our_launchers():
                return self._composer.typed([by_hydra.extending(text) for text in argv])
        return self._hydra(argv)


def _plain(words: Sequence[str]) -> bool:
    return all(
        _PLAIN.fullmatch(word)
        and not _SWEPT.fullmatch(word)
        and not word.lstrip("+~").startswith("hydra")
        for word in words
    )
