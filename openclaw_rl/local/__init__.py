"""See README.md of this package."""
