"""From the frozen config to the trainer: everything that a run consists of is made here."""
