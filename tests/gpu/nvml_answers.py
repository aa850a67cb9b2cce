"""Records what NVML answers to all that the monitor and doctor ask, as a fixture for good.

python -m tests.gpu.nvml_answers          writes tests/corpus/nvml/GPU-DRIVER.json

tests/monitor/test_nvml_answers.py plays the files of that folder (tests/monitor/nvml.py). They have
no identities: a handle is "gpu", and UUIDs are not kept.
"""

import json
import re
from typing import Any

import torch

from hpctrain.insight.monitor.nvidia import Nvidia
from tests.conftest import ROOT
from tests.monitor.nvml import FOLDER, call_of


class Recorder:
    """pynvml, or what stands for it; what it answers is kept in `answers`, by call."""

    def __init__(self, module: Any) -> None:
        self._module, self.answers = module, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not name.startswith("nvml"):
            return found

        def call(*arguments: Any) -> Any:
            try:
                answer = found(*arguments)
            except self._module.NVMLError as error:
                self.answers[call_of(name, arguments)] = {"error": error.value}
                raise
            self.answers[call_of(name, arguments)] = _plain(answer)
            return answer

        return call


def _plain(answer: Any) -> Any:
    """Return an answer as JSON has it: a structure of C becomes a dict."""
    answer = getattr(answer, "value", answer)  # pynvml returns some numbers of C as they are
    if isinstance(answer, bytes):
        return answer.decode()
    if answer is None or isinstance(answer, bool | int | float | str):
        return answer
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    names = [name for name, *_ in getattr(answer, "_fields_", ())] or vars(answer)
    return {name: _plain(getattr(answer, name)) for name in names}


def readings(library: Nvidia, gpu: Any) -> dict[str, Any]:
    """Return all readings of a GPU as JSON has them; an error by its number or name."""
    found: dict[str, Any] = {}
    for name in library.readings:
        try:
            found[name] = json.loads(json.dumps(library.read(name, gpu)))
        except library.errors as error:
            found[name] = {"error": getattr(error, "value", None)}
    return found


def recorded(module: Any, identity: str) -> dict[str, Any]:
    """Return what the library says of a GPU: all answers, and the readings made of them."""
    recorder = Recorder(module)
    library = Nvidia(recorder)
    library.open()
    found = readings(library, library.find(identity))
    found["processes"] = None  # of the machine, not of the GPU
    for call in [*recorder.answers]:
        if call.startswith("nvmlDeviceGetComputeRunningProcesses"):
            recorder.answers[call] = []
    return {"readings": found, "answers": recorder.answers}


def main() -> None:
    """Write the file of the first GPU; the last two lines are a note and the figures as JSON."""
    import pynvml

    found = recorded(pynvml, str(torch.cuda.get_device_properties(0).uuid))
    model, driver = found["readings"]["model"][0], found["readings"]["driver"][0]
    file = FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '-', model)}-{driver}.json"
    FOLDER.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['answers'])} answers in {file.relative_to(ROOT)}: commit it")
    print(json.dumps(found["readings"]))


if __name__ == "__main__":
    main()
