"""openclaw-rl trains a personal agent while it is being used."""

__version__ = "0.1.0"
