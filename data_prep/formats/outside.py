"""Refuse symbolic links in a folder that lead out of it.

A folder from somebody else may have a link to `~/.ssh/id_ed25519` with the name `notes.txt`. The
content would become samples, and would be published with the data set.
"""

import os
from functools import lru_cache

from hpctrain.errors import DataError

OPTIONS = """
--allow-outside
    follow symbolic links in SRC that lead out of it, such as those of a Hugging Face cache; without
    this option they are refused
"""


class Inside:
    """Checks that paths in a folder also lie in it when their links are followed."""

    def __init__(self, folder: str, outside: bool) -> None:
        self._outside = outside
        self._root = os.path.realpath(folder)
        self._folder = lru_cache(maxsize=1024)(os.path.realpath)  # many files are in each folder

    def problem(self, path: str) -> str:
        """Return why a path must not be read, "" if it may be; the message follows the path."""
        if self._outside:
            return ""
        above, name = os.path.split(path)
        try:
            real = os.path.join(self._folder(above), name)
            if os.path.islink(real):
                real = os.path.realpath(real)
        except ValueError:  # a zero byte: whoever opens the path reports it
            return ""
        if os.path.commonpath([self._root, real]) == self._root:
            return ""
        return (
            f"is a link that leads out of the folder, to {real}; --allow-outside follows such links"
        )

    def check(self, path: str) -> None:
        """Check one path."""
        if problem := self.problem(path):
            raise DataError(f"{path} {problem}")
