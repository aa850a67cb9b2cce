"""`python -m hpctrain export RUN OUT`: the weights of a run."""

import argparse
import shutil
import sys
from pathlib import Path

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import sync
from hpctrain.commands.select import add_choice, one_run
from hpctrain.config.sections import ModelSections
from hpctrain.results.loaded import LoadedRun
from hpctrain.runs import trust

_FILE_BYTES = 5 * 10**9  # of weights, as Hugging Face has it


def main(argv: list[str]) -> int:
    """Write the weights; print what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain export",
        description="Write the weights of a run as safetensors, in the layout of Hugging Face "
        "where the model has one. It works without a GPU, in the memory of one file.",
    )
    add_choice(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument(
        "--ema", action="store_true", help="take the moving average of the parameters (train.ema)"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add adapters (LoRA) to the weights; without it, only the adapters are written, as "
        "peft writes them",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp64", "fp32", "bf16", "fp16"),
        help="the format of the weights (default: precision.params of the run)",
    )
    trust.add_argument(parser)
    options = parser.parse_args(argv)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError(f"{options.out} exists: give a folder that does not, or an empty one")
    run = LoadedRun(one_run(options.dir, options.run, "export"))
    checkpoint = run.checkpoint(options.step, best=options.best)
    # Imported late: torch takes seconds, and an error above needs none of it.
    from hpctrain.results.exporting.exporter import Exporter

    run.find_code("export")
    exporter = Exporter(
        ModelSections.of(run.config),
        checkpoint,
        merge=options.merge,
        dtype=options.dtype,
        ema=options.ema,
    )
    unfinished = options.out.absolute().with_name(f".{options.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        made = exporter.write(
            unfinished, _FILE_BYTES, lambda name: print(f"writing {name}", file=sys.stderr)
        )
        if options.out.exists():
            options.out.rmdir()
        unfinished.rename(options.out)
        sync(options.out.absolute().parent)
    except OSError as error:
        raise StorageError(
            f"{options.out}: cannot write {error.filename or unfinished} ({error.strerror})"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    files = "1 file" if len(made.files) == 1 else f"{len(made.files)} files"
    print(
        f"{options.out}: {checkpoint.name} of {run.path.name}, {made.nbytes / 1e6:.1f} MB in "
        f"{files}, {made.kind}"
    )
    return 0
