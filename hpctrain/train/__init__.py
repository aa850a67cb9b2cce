"""The loop and its few collaborators; everything is built elsewhere (`hpctrain.job.build`)."""
