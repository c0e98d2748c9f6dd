"""What a run writes: lines on the screen, the log, the plot, and its directory."""
