"""What knows nothing of training: files, records, secrets, terminals, processes."""
