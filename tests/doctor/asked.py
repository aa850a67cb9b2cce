"""What the tests of this folder ask of nodes."""

from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.insight.doctor.probe import Expectation


def expected_of(config: Config) -> Expectation:
    """Return what a job of this config asks of its nodes."""
    job = JobRequest.of(config)
    sections = job.launch, config.parallel, config.network, config.data
    return Expectation(*sections, job.output_dir, job.mixed)
