"""The checks: one module per exercise; a check is a function that raises Mismatch for a wrong result."""
