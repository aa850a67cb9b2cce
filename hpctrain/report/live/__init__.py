"""`python -m hpctrain top`: what the nodes and GPUs of a run do now, in the terminal."""
