"""What must hold for the weights that a run starts from, as far as the config alone shows it."""

from collections.abc import Iterator

from hpctrain.config.schema import CheckpointConfig


def problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield what is wrong in the keys `checkpoint.init_*`."""
    if "://" in (checkpoint.init_from or ""):
        yield (
            f"checkpoint.init_from={checkpoint.init_from}: it must be a folder or a file on a disk "
            "that the nodes see; download it first"
        )
    for i, rule in enumerate(checkpoint.init_rename):
        key = f"checkpoint.init_rename[{i}]"
        texts = [rule.get("match"), rule.get("to")]
        if set(rule) != {"match", "to"} or not all(isinstance(each, str) for each in texts):
            yield f"{key}={rule}: it must be {{match: PATTERN, to: NAME}}"
            continue
        stars = [str(each).count("*") for each in texts]
        if stars[1] not in (0, stars[0]):
            yield f"{key}={rule}: `to` has {stars[1]} times *, `match` has {stars[0]}"
