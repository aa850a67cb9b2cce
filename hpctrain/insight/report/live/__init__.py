"""`python -m hpctrain status --live`: what the nodes and GPUs of a run do now, in the terminal."""
