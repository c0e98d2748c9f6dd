"""What a run writes: lines on the screen, the log and the plot."""
