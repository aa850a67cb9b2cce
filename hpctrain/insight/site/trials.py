"""What `sbatch --test-only` says of a small job: the controller is asked, and nothing is queued.

The plugins of a site answer, too, whose rules no other command shows: that GPUs must be asked for
with --gres, or need a type, or that memory comes with the cores. Where all that we would write is
taken, it is one call.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping

from hpctrain.cluster.slurm.queue import call

_SCRIPT = "#!/bin/sh\ntrue\n"
_ANSWER_S = 20
# It would be taken, and wait: that nodes are down now says nothing of how they are asked for.
_WAITS = re.compile(r"\b(busy|down|drained|reserved|limit)\b", re.I)
Options = Mapping[str, str]


def refusal(options: Options) -> str | None:
    """Return why sbatch would refuse a job with these options; "" if not, None for no answer."""
    words = [f"--{name}={value}" for name, value in options.items()]
    try:
        done = call("sbatch", "--test-only", *words, input=_SCRIPT, timeout_s=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = " ".join(done.stderr.split())
    if not done.returncode or _WAITS.search(said):
        return ""
    return None if re.search(r"timed out|unable to contact", said, re.I) else said or "no reason"


class Trials:
    """Finds the options that a site takes, among those that `site` can write.

    Attributes:
        problem: Why sbatch refuses even a job that asks for nothing special; "" if it does not.
        answers: Whether sbatch has answered at all.
    """

    def __init__(self, base: Options, gpu_type: str | None, has_gpus: bool) -> None:
        self._base, self._type, self._gpus = base, gpu_type, has_gpus
        self.problem, self.answers = "", True
        self.gpu_option, self.gpu_needs_type, self.memory_option = "gpus-per-node", False, "mem"
        usual = {"gpus-per-node": "1"} if has_gpus else {}
        whole = refusal({**base, **usual, "mem": "1000M"})
        if whole is None:
            self.answers = False
        elif whole:
            self._one_by_one()

    def _one_by_one(self) -> None:
        self.problem = refusal(self._base) or ""
        asked: Options = {}
        if self._gpus:
            found = self._first({}, self._gpu_forms())
            if found:  # perhaps a plugin refuses only jobs without GPUs
                asked, self.problem = found, ""
                self.gpu_needs_type = f"{self._type}:" in "".join(found.values())
            if not self.problem:
                self.gpu_option = next(iter(found), "none")
        if self.problem:
            return
        names = ["mem", "mem-per-cpu", "mem-per-gpu"] if asked else ["mem", "mem-per-cpu"]
        memory = self._first(asked, ({name: "1000M"} for name in names))
        self.memory_option = next(iter(memory), "none")

    def _gpu_forms(self) -> Iterator[Options]:
        for kind in [None, self._type] if self._type else [None]:
            yield {"gpus-per-node": f"{kind}:1" if kind else "1"}
            yield {"gres": f"gpu:{kind}:1" if kind else "gpu:1"}

    def _first(self, asked: Options, forms: Iterator[Options]) -> Options:
        """Return the first form that sbatch takes beside what is `asked`; none if it takes none."""
        return next((each for each in forms if refusal({**self._base, **asked, **each}) == ""), {})
