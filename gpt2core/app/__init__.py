"""The two commands, train and inference: flags, files, checkpoints, logs, and agreement between ranks."""
