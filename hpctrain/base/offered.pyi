"""What our own extensions give to the core, by name: type checkers read it, and offered.py does.

What is not here, the core does without.
"""

from hpctrain.addons import hooks as hooks
from hpctrain.addons import quantized as quantized  # train.lora.quantize
from hpctrain.addons import slow_ranks as slow_ranks  # which rank the others wait for
from hpctrain.addons.average import Average as Average  # train.ema
from hpctrain.addons.gradient_compression import PowerSGD as PowerSGD  # train.compression
from hpctrain.addons.looking.first_look import FirstLook as FirstLook  # what would train wrong
from hpctrain.addons.looking.held_values import check_parameters as check_parameters
from hpctrain.addons.looking.rows import (
    check_evaluated as check_evaluated,  # rows that only fill up
)
from hpctrain.addons.node import environment as environment  # launch.environment=image
from hpctrain.addons.node.stage import Stage as Stage  # data.stage: copies of shards on the node
from hpctrain.addons.watch import Watch as Watch  # train.watch
from hpctrain.commands.sync import sync as sync  # what the uploader of a finished run has left
from hpctrain.insight import foreign_targets as foreign_targets  # the arguments of users' classes
from hpctrain.insight import preflight as preflight  # launch.preflight: the checks of the nodes
from hpctrain.insight.estimates import hardware as hardware  # what a machine can do, for MFU
from hpctrain.insight.estimates import right_size as right_size  # what a job did not need
from hpctrain.insight.estimates.advice import cures as cures  # when a GPU has no memory left
from hpctrain.insight.flops.flops import Utilisation as Utilisation
from hpctrain.insight.flops.flops import build_utilisation as build_utilisation  # the MFU of a run
from hpctrain.insight.monitor import metric_names as metric_names  # what the sensors measure
from hpctrain.insight.monitor.process import monitored as monitored  # the sensors of a node
from hpctrain.insight.profiled_steps import ProfiledSteps as ProfiledSteps  # train.profile
from hpctrain.results import summary as summary  # what is printed at the end of a training here
from hpctrain.search import pieces as pieces  # what becomes of a worker's job
from hpctrain.search import trials as trials  # the copy of the code that a search uses
from hpctrain.search import worker_arrays as worker_arrays  # for `cancel`
from hpctrain.search.standing import Standing as Standing  # for `status`
from hpctrain.trackers.several import SeveralTrackers as SeveralTrackers  # tracking.also

def table() -> dict[str, tuple[str, str]]: ...
