"""What decides whether a version is served. See README.md of this package."""

from openclaw_rl.guards.gate import Figures, Guard, Prober, batch_refusal, best_of, refusal
from openclaw_rl.guards.probes import Probes

__all__ = ["Figures", "Guard", "Prober", "Probes", "batch_refusal", "best_of", "refusal"]
