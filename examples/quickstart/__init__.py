"""The quickstart: a simulated user talks to a small real model, which adapts to them."""
