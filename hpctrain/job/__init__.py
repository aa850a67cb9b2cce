"""A name of before: batch scripts that older versions have queued call `hpctrain.job.verdict`."""
