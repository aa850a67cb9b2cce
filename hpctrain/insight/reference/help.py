"""The texts of `--help`: what a beginner needs, `--help all`, and `--help NAME`."""

import json
import textwrap
from pathlib import Path

from hpctrain.base.files import yaml_file
from hpctrain.base.files.yaml_file import conf_dir, groups
from hpctrain.config.schema import all_members
from hpctrain.insight.reference import keys

# conf/config.yaml does not name these groups, so Hydra adds a choice of them.
_ADDED = ("scaling",)

_HELP = """\
hpctrain: from a config to finished, trustworthy training runs on Slurm

  python -m hpctrain experiment=digits                  train here
  torchrun --nproc-per-node 2 -m hpctrain experiment=digits    with 2 ranks
  python -m hpctrain -m experiment=digits seed=0,1      submit one job per value
  sbatch slurm/train.sbatch experiment=digits           submit one job

If a run was stopped (Ctrl-C, preemption, kill -9), the same command resumes it
from its last checkpoint.

Keys of a training, such as
  model=resnet18                   one of the models (--help all lists them)
  data.path=data/mine              the folder of the data set
  train.max_steps=2000             how long to train
  optimizer.lr=1e-3                the learning rate
  launch.nodes=2                   the nodes of the job

Commands, such as                  (RUN: a name, the start of it, or a path)
  plan experiment=digits           memory, time and cost, before it is queued
  status                           the states of your runs
  logs RUN                         its output, or why it failed; -f follows it
  cancel RUN                       stop it for good
  resume RUN                       start it again if it failed
  evaluate RUN --split test        the metrics of its checkpoint
  predict RUN data/mine out        what its model says of each sample
  export RUN out                   its weights as safetensors
  report RUN                       where its time went, and what to change
  doctor                           check versions, Slurm and storage
  shell RUN                        a shell on a node, beside a run that runs

More help
  --help train, --help optimizer.lr, --help warmup     keys by section or word
  --help perf/                     what a run measures, with units
  status --help                    the options of a command
  --help all                       all commands, choices and keys
"""

ALL = """\
Commands
  status [RUN|SWEEP]   show the states of the runs; --watch repeats it
  status --live [RUN]  live: what the nodes and GPUs of a run do; --once --json
  status --upload [RUN_DIR...] upload to MLflow what it does not have yet
  logs RUN             show the output of a run, or why it failed; -f follows it
  cancel RUN|SWEEP     stop runs for good; --save: after a checkpoint
  resume [RUN|SWEEP]   start runs again that failed or were preempted
  resume --branch RUN  make a run that goes on from a checkpoint of another one
  evaluate RUN         the metrics of a checkpoint, on any split and data set
  predict RUN DATA OUT write what the model says of each sample as HDF5 shards
  predict RUN --prompt TEXT    let a trained language model continue a text
  export RUN OUT       write weights as safetensors; --merge adds its adapters
  report [RUN|SWEEP]   where the time and GPU-hours went, and what to change;
                       --compare RUN RUN: what differs, and where two runs part
  report --plot RUN... draw curves in the terminal, or --out FILE.png
  plan OVERRIDES       tell memory, time and cost of a run before it is queued
  doctor               check versions, Slurm, storage; --nodes N: in a job
  doctor --env [--json]        the ranks, hosts, Slurm variables of this process
  bench OVERRIDES      measure loader, steps and links
  gc                   list what can be deleted; only --delete deletes it
  new DIR              write a project of your own that trains at once
  shell [RUN]          a shell on a node, with what the ranks of a run have;
                       --debug: a debugger at its first step or its error;
                       --jupyter: a notebook
  init-site            write conf/site/mine.yaml from what this cluster says;
                       --check tells what in it no longer fits
  cluster up           a real Slurm with several nodes on this machine;
                       cluster --help: down, preempt JOB, cut NODE, ...

What jobs and templates call
  freeze OVERRIDES     check a config, write its run directory, print its path
  run RUN_DIR          train a frozen run directory; --until-step K pauses it
  work, call           a rank of a search's worker, of a submitted function

Choices (NAME=CHOICE)
{groups}
Values (KEY=VALUE)
{keys}
  --help keys, --help metrics                      every key; every metric
  --help json                                      the schema of --json
  python -m hpctrain experiment=digits --cfg job   prints the values of a config

--config-dir DIR adds a folder of configs; --hydra-help explains Hydra's own
options; --version.

Exit codes: 0 finished or paused, 1 the training raised an exception, 2 config,
3 data, 4 scheduler, 5 ranks or ports, 6 run directory, 7 tracking, 8 a number
is not finite, 9 a node fails its checks, 130 saved and stopped by Ctrl-C, 143
saved and stopped by a signal. HPCTRAIN_DEBUG=1 shows the tracebacks of errors.
"""


def show(topics: list[str]) -> int:
    """Print the help, or what is known of keys or metrics by their names or words."""
    if topics == ["json"]:
        schema = yaml_file.read(Path(__file__).with_name("output.yaml"))
        print(json.dumps(schema, indent=2))
    elif topics == ["all"]:
        made = groups(conf_dir()).items()
        listed = [f"{as_typed(name):<12} {', '.join(choices)}" for name, choices in made]
        columns = ["\n".join(map(_folded, lines)) for lines in (listed, _sections())]
        print(ALL.format(groups=columns[0] + "\n", keys=columns[1]), end="")
    elif not topics:
        print(_HELP, end="")
    else:
        keys.show(topics)
    return 0


def as_typed(group: str) -> str:
    """Return how a command line names a group: those of no usual run need a plus, `+scaling`."""
    return f"+{group}" if group in _ADDED else group


def _sections() -> list[str]:
    """Return one line per section of the schema: its name and its keys."""
    return [
        f"{member.name + '.':<12} {', '.join(vars(member.default))}"
        for member in all_members()
        if member.is_section and "." not in member.name
    ]


def _folded(line: str) -> str:
    """Return a name and its words in 80 columns, indented."""
    return textwrap.fill(
        line, 79, initial_indent="  ", subsequent_indent=15 * " ", break_on_hyphens=False
    )
