"""`python -m hpctrain predict RUN --prompt TEXT`: let a trained language model continue a text."""

import argparse
import math
import sys

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.terminal.terminal import exact
from hpctrain.commands.select import add_dir, one_run
from hpctrain.runs import trust
from hpctrain.runs.checkpoints.manifest import checkpoints


def main(argv: list[str]) -> int:
    """Print the prompt and what the model makes of it, token by token."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain predict --prompt",
        description="Continue a text with the language model of a run, from its newest intact "
        "checkpoint.",
    )
    parser.add_argument("run", metavar="RUN", help="its directory, its name or the start of it")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    add_dir(parser)
    parser.add_argument(
        "--data", metavar="DIR", help="the data set, if it is no longer where the run has read it"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="number of tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="the logits are divided by it; 0 always takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed, the same text (default: 0)"
    )
    trust.add_argument(parser)
    options = parser.parse_args(argv)
    _check(options)
    path = one_run(options.dir, options.run, "predict --prompt")
    if not checkpoints(path / "checkpoints"):
        raise StorageError(
            f"{path.name} has no checkpoint: it was not trained long enough for the first "
            "(checkpoint.every_steps)"
        )
    # Imported late: torch takes seconds, and an error above needs none of it.
    from hpctrain.results.text_generation import Generator

    generator = Generator.of(path, options.data)
    print(f"==> {generator.checkpoint} <==", file=sys.stderr, flush=True)
    try:
        for text in generator(
            options.prompt, options.tokens, temperature=options.temperature, seed=options.seed
        ):
            print(text, end="", flush=True, file=exact())
    except KeyboardInterrupt:
        pass
    print()
    return 0


def _check(options: argparse.Namespace) -> None:
    if not options.prompt:
        raise ConfigError('the prompt is empty: give a text to continue, such as "def"')
    if options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: it is 1 or more")
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature}: it is 0 or more")
