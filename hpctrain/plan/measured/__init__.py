"""Short jobs that measure layouts, and what they measured beside what was predicted."""
