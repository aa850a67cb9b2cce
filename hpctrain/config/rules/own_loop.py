"""A loop of one's own: which config has one, and what only our own loop can do.

loop: {_target_: hpctrain.supervised}      trains `model` on `task` with `optimizer`
loop: {_target_: my_package.gan.train}     any function whose first argument is the session
"""

from collections.abc import Iterator, Sequence

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, ParallelConfig

OURS = "hpctrain.supervised"
SCRIPT = "hpctrain.session"  # the loop is the program that has opened the session
_REFUSED = {
    "cp": "the loop would have to divide each sequence",
    "tp": "the loop would have to compute the loss from divided layers",
    "pp": "the loop would have to call the stages by a schedule",
    "ep": "the loop would have to balance the experts",
}


def has_own(config: Config) -> bool:
    """Return whether the loop of a config is not ours."""
    return config.loop.get("_target_") != OURS


def is_program(config: Config) -> bool:
    """Return whether the loop is the program that has opened the session."""
    return config.loop.get("_target_") == SCRIPT


def check_callable(config: Config) -> None:
    """Refuse to call the loop of a program, with a ConfigError."""
    if is_program(config):
        raise ConfigError(
            f"loop._target_={SCRIPT}: the loop of this run is a program that opens the session by "
            "itself: start it again, with the same overrides, and it goes on from its checkpoint"
        )


def check_ours(config: Config, what: str) -> None:
    """Refuse what needs the model and the task of our own loop, with a ConfigError."""
    if has_own(config):
        raise ConfigError(
            f"loop._target_={config.loop.get('_target_')}: {what} knows the model and the task of "
            "our own loop only; a loop of one's own evaluates, saves and exports within its steps"
        )


def layout_problems(parallel: ParallelConfig, compute: str) -> Iterator[str]:
    """Yield why a model cannot be spread for a loop of one's own, and computed in this format."""
    for name, reason in _REFUSED.items():
        if getattr(parallel, name) > 1:
            yield (
                f"parallel.{name}={getattr(parallel, name)}: {reason}; a loop of one's own has "
                "ddp, zero and hsdp (parallel.dp_replicate, parallel.dp_shard)"
            )
    if parallel.weights is not None:
        yield (
            f"parallel.weights={parallel.weights}: a loop of one's own gives all ranks as many rows"
        )
    if compute in ("fp16", "fp8"):
        yield (
            f"precision.compute={compute}: a loop of one's own has fp64, fp32, tf32 and "
            "bf16, which need no scale of the loss and no layers of their own"
        )


def problems(config: Config, sizes: Sequence[int]) -> Iterator[str]:
    """Yield what a loop of one's own cannot have, with any of the numbers of ranks."""
    parallel = config.parallel
    yield from layout_problems(parallel, config.precision.compute)
    if config.train.nonfinite == "skip":
        yield (
            "train.nonfinite=skip: a loop of one's own has made its update when it logs a number, "
            "so it cannot be left out; use stop or rollback"
        )
    if config.train.nonfinite == "rollback" and is_program(config):
        yield (
            "train.nonfinite=rollback: the session is opened by a program, whose lines before it "
            "cannot be called once more; use stop, or make the loop a function (loop=NAME)"
        )
    wrong = []
    for ranks in sizes:
        try:
            degrees = Degrees.of(parallel, ranks)
        except ConfigError as error:
            wrong.append(f"{error}")
            continue
        found = batch_sizes.problems(config.train, parallel, degrees) if config.data.path else ()
        wrong.extend([*found][:1])
    if len(wrong) == len(sizes):
        yield wrong[0]
