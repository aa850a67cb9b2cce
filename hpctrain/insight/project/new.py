"""`python -m hpctrain new DIR`: write a project of one's own that trains at once.

It has a package with a model and a generator of samples, a config, a file for the cluster, a test
and a batch script, all of which are meant to be changed.
"""

import argparse
import re
from pathlib import Path

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.yaml_file import conf_dir

_TEMPLATE = Path(__file__).parent / "template"


def main(argv: list[str]) -> int:
    """Write the project, print what to do next, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain new", description=__doc__)
    parser.add_argument("dir", type=Path, help="a folder that does not exist, or is empty")
    folder: Path = parser.parse_args(argv).dir
    name = re.sub(r"[-. ]", "_", folder.resolve().name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"{folder}: {name!r} is no name of a package: small letters, digits and _, and a "
            "letter first"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: it exists already; a project is written into a new folder")
    for path, text in _files(name).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    readme = (folder / "README.md").read_text()
    commands = readme.partition("```bash\n")[2].partition("```")[0]
    print(f"a project is in {folder}; its README has these commands:\n\n  cd {folder}")
    print("".join(f"  {line}\n" for line in commands.splitlines()), end="")
    return 0


def _files(name: str) -> dict[str, str]:
    """Return the text of each file of a project by its path."""
    found = {}
    for file in sorted(_TEMPLATE.rglob("*.txt")):
        path = file.relative_to(_TEMPLATE).as_posix().removesuffix(".txt")
        found[path.replace("NAME", name)] = file.read_text().replace("NAME", name)
    found["conf/site/mine.yaml"] = (conf_dir() / "site" / "example.yaml").read_text()
    found["train.sbatch"] = (conf_dir().parent / "slurm" / "train.sbatch").read_text()
    return found
