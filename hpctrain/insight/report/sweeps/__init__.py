"""What several runs say together: parameters against the metric, seeds, scaling."""
