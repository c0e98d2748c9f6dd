"""ZeRO-2 and ZeRO-3: gradients and parameters divided over data-parallel ranks, unit by unit."""
