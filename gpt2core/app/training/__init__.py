"""The training commands: inputs, setup, the loop, continuing a run, and the process that writes checkpoints."""
