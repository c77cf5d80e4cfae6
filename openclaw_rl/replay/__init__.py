"""Past conversations as a start: off-policy turns in the journal. See README.md of this package."""
