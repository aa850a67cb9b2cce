"""What follows from the end of the ranks: restarts inside of an allocation, and by the queue."""
