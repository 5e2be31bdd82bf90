"""What the daemon and its compute worker say to each other, and the memory they share."""
