"""EZPoints: make 12 from the numbers of two cards."""
