"""The values that a user has chosen."""

from hpctrain.config.identity import chosen, override_key
from hpctrain.config.schema import Config


def test_what_differs_and_what_was_named_is_chosen() -> None:
    config = Config()
    config.optimizer.lr *= 2
    config.model = {"_target_": "m.Net", "width": 3}
    assert chosen(config) == {"model": config.model, "optimizer.lr": config.optimizer.lr}
    # A sweep over seeds has the default among its values.
    named = chosen(config, ["++seed=0", "experiment=digits", "optimizer.lr=1"])
    assert named == {**chosen(config), "seed": 0}


def test_keys_of_overrides() -> None:
    texts = ["a.b=1", "+a.b=1", "++a.b=x=y", "~a.b"]
    assert {override_key(text) for text in texts} == {"a.b"}
