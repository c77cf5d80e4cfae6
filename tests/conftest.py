"""For all tests."""

from hypothesis import HealthCheck, settings

# How fast a machine makes examples says nothing about the code: on a busy one the check fails.
settings.register_profile(
    "any-machine", suppress_health_check=[HealthCheck.too_slow], deadline=None
)
settings.load_profile("any-machine")
