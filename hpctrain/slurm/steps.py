"""See `hpctrain.cluster.slurm.steps`."""

from hpctrain.cluster.slurm.steps import TEXT

if __name__ == "__main__":
    print(TEXT, end="")
