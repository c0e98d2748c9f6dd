"""The training commands: inputs, setup, the loop, and the process that writes checkpoints."""
