"""The training loop and the objects that it calls; `hpctrain.job.build` builds them."""
