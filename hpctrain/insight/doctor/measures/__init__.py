"""What is measured by the ranks of a job: compute, memory and communication."""
