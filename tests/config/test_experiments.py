"""The experiments that come with hpctrain are valid on the nodes for which they are written."""

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "ranks", "micro"),
    [
        (["experiment=gpt2_124m", "hardware=h100_sxm"], 8, 30),
        (["experiment=gpt2_124m", "hardware=a100_40", "train.accumulate=4"], 8, 15),
        (["experiment=llama3_8b", "hardware=h100_sxm"], 16, 1),
        (["experiment=llama3_8b", "hardware=a100_80", "launch.nodes=4"], 32, 1),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_an_experiment_on_its_nodes(
    composer: Composer, overrides: list[str], ranks: int, micro: int
) -> None:
    config = composer.typed(overrides)
    validate(config, ranks)
    sizes = BatchSizes.of(config.train, config.parallel, Degrees.of(config.parallel, ranks))
    assert sizes.micro == micro


@pytest.mark.parametrize("more", [[], ["model=vit_b16", "optimizer=adamw", "optimizer.lr=1e-3"]])
def test_imagenet_needs_only_the_package_with_the_model(
    composer: Composer, more: list[str]
) -> None:
    config = composer.typed(["experiment=imagenet", *more])
    try:
        validate(config, 8)
    except ConfigError as error:
        (said,) = str(error).splitlines()
        assert said.endswith("here: pip install 'hpctrain[vision]'")
