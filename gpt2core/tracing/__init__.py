"""What a program does while it trains: functions around kernels and collectives, and traces of training steps."""
