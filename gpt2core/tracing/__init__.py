"""Record training steps: hooks, which call a function around each kernel and collective, and traces."""
