"""Files: locks, records, mailboxes, YAML, and what a disk can refuse."""
