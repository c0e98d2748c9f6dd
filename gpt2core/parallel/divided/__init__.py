"""The arena and its update divided over threads and ranks (ZeRO-1), and the norm of all parts."""
