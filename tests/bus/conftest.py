"""Property tests run beside whatever else the machine does: their verdict is about values, not about time."""

from hypothesis import HealthCheck, settings

settings.register_profile("bus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bus")
