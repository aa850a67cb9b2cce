"""What is done with trained runs: branch them, export their weights, evaluate them, predict."""
