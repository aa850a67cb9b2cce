"""What follows from an end that rank 0 alone knows, such as a node that has failed its checks."""

from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.restarts.policy import End, Room
from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.cluster.slurm.sbatch_options import joined_hosts
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.ending import decide


def go_on(run: RunDir, ranks: RankInfo, end: End, config: Config) -> None:
    """Decide what follows from an end that rank 0 alone knows, and requeue the job if need be.

    Outside Slurm nobody starts the ranks again, and nothing is done.
    """
    if ranks.launcher != "slurm":
        return
    inside = epochs.in_loop(run.path, ranks.attempt_key)
    room = Room.of(run.read(), inside=inside, warn_s=config.launch.warn_s)
    # A batch script that restarts ranks asks what was decided, and does it.
    if decide(run, end, room).goes_on and not inside:
        own = str(config.site.sbatch.get("exclude") or "")
        # It avoids also a host that was only unlike: the GPUs of one host may differ.
        avoided = excluded_hosts.avoided(JobRequest.of(config))
        hosts = sorted({*end.hosts, *avoided}) if end.hosts else ()
        requeue_from_rank(ranks.job_id, exclude=joined_hosts(own, *hosts) if hosts else "")
