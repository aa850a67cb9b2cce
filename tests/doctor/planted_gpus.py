"""GPUs that are not there, planted into the jobs of the development cluster.

There is no GPU here. Slurm gives each job some of the two fake GPUs of a node, and sets
CUDA_VISIBLE_DEVICES. In the jobs, `pynvml` is the stand-in of tests/monitor/nvml.py, and the ranks
are told that torch sees the GPUs of that variable; they compute on the CPU, whose speed would be
judged as that of a GPU, and is not measured.
"""

from pathlib import Path

from tests.conftest import ROOT

PYNVML = """\
from tests.monitor.nvml import Nvml

played = Nvml()
played.used = 0


def __getattr__(name):
    return getattr(played, name)
"""
SITE = """\
import importlib.util, os, sys


def seen(*_, **__):
    numbers = [int(each) for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return [("GPU-a", "GPU-b")[each] for each in numbers]


def of_devices(module):
    module.kind, module.job_gpus = lambda *_, **__: "cpu", seen


def of_node_job(module):
    module.visible_gpus = seen


def of_speed(module):
    module.measured = lambda device: {}


class Finder:
    places = {
        "hpctrain.doctor.measures.speed": of_speed,
        "hpctrain.distributed.devices": of_devices,
        "hpctrain.doctor.measures.node_job": of_node_job,
    }

    def find_spec(self, name, path=None, target=None):
        if name not in self.places:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.places[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


class PlantedGpus:
    """The files that jobs import.

    Args:
        folder: A new folder for them.

    Attributes:
        override: What puts them into a job.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "pynvml.py").write_text(PYNVML)
        (folder / "sitecustomize.py").write_text(SITE)
        self.override = f"+site.env.PYTHONPATH={folder}:{ROOT}"
