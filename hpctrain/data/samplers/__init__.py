"""Which sample stands at a position: pure functions (see `order`), and what they are made of."""
