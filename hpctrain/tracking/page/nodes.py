"""Tags about the nodes of a run, from what their monitors have written.

hpctrain.node.n01  driver=570.1, gpu_0=NVIDIA H100, kernel=6.8.0
hpctrain.idle      n01: gpu_0 below 5% for 30 minutes
"""

from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.names.run_record import Hang
from hpctrain.base.secrets import mask
from hpctrain.tracking import samples

_MOST_NODES = 64


class Nodes:
    """The nodes of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._facts: dict[str, Mapping[str, str]] = {}  # the newest of each node
        self._read: dict[str, int] = {}
        self._tags: dict[str, str] = {}

    def new_tags(self) -> dict[str, str]:
        """Return the tags that this object has not returned before, with these values."""
        for node, sample in samples.new(self._run_dir, self._read):
            self._read[node] = sample.end
            if sample.facts:
                self._facts[node] = sample.facts
        found = {
            f"hpctrain.node.{node}": ", ".join(f"{name}={value}" for name, value in facts.items())
            for node, facts in [*self._facts.items()][:_MOST_NODES]
        }
        if idle := "; ".join(text for _, text in samples.idle(self._run_dir).values()):
            found["hpctrain.idle"] = idle
        if hang := Hang.get(self._run_dir):
            found["hpctrain.hang"] = hang.sentence
        found = {key: mask(value) for key, value in found.items()}
        new = {key: value for key, value in found.items() if self._tags.get(key) != value}
        self._tags |= new
        return new
