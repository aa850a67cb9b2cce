"""Rules: what the values of a config must fulfil, by themselves and together."""
