"""The checks of the exercises: one module per stage; a check is a function that raises Mismatch for a wrong result."""
