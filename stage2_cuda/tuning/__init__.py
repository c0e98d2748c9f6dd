"""Choose kernel configurations by timing them."""
