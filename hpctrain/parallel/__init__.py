"""How a model is spread over the ranks."""
