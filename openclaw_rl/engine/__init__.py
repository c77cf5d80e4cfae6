"""See README.md of this package."""

from openclaw_rl.engine.model_folder import model_fingerprint

__all__ = ["model_fingerprint"]
