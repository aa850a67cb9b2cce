"""One rank of a large world in this process: what it holds, and what it sends in a step."""
