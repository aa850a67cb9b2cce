"""`python -m hpctrain.insight.translate FILE`: a config of DeepSpeed or Accelerate as ours."""

import argparse
import sys
from pathlib import Path

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import guard, indented, printable
from hpctrain.errors import HpctrainError
from hpctrain.insight.translate.foreign import load, translate


def main(argv: list[str]) -> int:
    """Print the translation of a file."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.insight.translate",
        description="Translate a config of DeepSpeed or Hugging Face Accelerate into a "
        "file for conf/experiment. The comments in it name every key without a counterpart, and "
        "the reason.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    file = parser.parse_args(argv).file
    print(translate(load(file), file).yaml(f"Translated from {printable(file.name)}"), end="")
    return 0


if __name__ == "__main__":
    guard()
    try:
        sys.exit(main(sys.argv[1:]))
    except HpctrainError as error:
        print(f"error: {indented(mask(str(error)))}", file=sys.stderr)
        sys.exit(error.exit_code)
