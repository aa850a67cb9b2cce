"""What is checked on a node: one module for each thing, and its functions return findings."""
