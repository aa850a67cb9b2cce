"""What models are made of, and the engine knows how to divide."""
