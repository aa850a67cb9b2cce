"""Whether a run has room on its GPUs and on their hosts."""

from hpctrain.base.units import GIB
from hpctrain.config.schema import LoRAConfig, TrainConfig
from hpctrain.insight.plan.memory import Fit, margin_of, on_gpu, on_host, worst


def test_room_on_a_gpu_and_on_its_host() -> None:
    """A margin stays free in what fits; what decides is what does not fit, then what is unknown."""
    assert on_gpu(95.0 * GIB, 100 * GIB) == Fit(True)
    assert on_gpu(96.0 * GIB, 100 * GIB) == Fit(
        True, True, "needs 96.0 GiB of 100.0 GiB per GPU, so that less than 5% stays free"
    )
    # With adapters more has to stay free: reports of others are up to 20 % above predictions.
    assert margin_of(TrainConfig()) == 0.05
    margin = margin_of(TrainConfig(lora=LoRAConfig(match="*")))
    assert on_gpu(81.0 * GIB, 100 * GIB, margin=margin).tight
    assert not on_gpu(79.0 * GIB, 100 * GIB, margin=margin).tight
    assert on_gpu(101.0 * GIB, 100 * GIB) == Fit(
        False, reason="needs 101.0 GiB of 100.0 GiB per GPU"
    )
    assert on_gpu(1, None).possible is on_gpu(1, 2, complete=False).possible is None
    assert on_gpu(3, 2, complete=False).possible is False
    assert on_host(119 * GIB, 2, 140) == on_host(119 * GIB, 2, None) == Fit(True)
    assert on_host(125 * GIB, 2, 140).tight
    assert on_host(141 * GIB, 2, 140).possible is False
    no, unknown, tight, yes = Fit(False), Fit(None), Fit(True, True), Fit(True)
    assert worst(yes, no) is worst(no, unknown) is no
    assert worst(unknown, tight) is unknown
    assert worst(yes, tight) is tight
