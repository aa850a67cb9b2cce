"""The metrics of the sensors, below `system/`: metrics.yaml has their names, units and meanings."""

from pathlib import Path

from hpctrain.base.files import yaml_file
from hpctrain.config.metric_registry import Metric

_TEXTS: dict[str, str] = yaml_file.read(Path(__file__).with_name("metrics.yaml"))
METRICS = [Metric.of(name_unit, text) for name_unit, text in _TEXTS.items()]
