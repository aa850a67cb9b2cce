"""How a checkpoint is written: by a process of its own, while the training goes on."""
