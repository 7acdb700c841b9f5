"""What the tests of the package share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: a test's verdict must not depend on how busy the machine is. Derandomised: a red run
# can be run again, and the same commit is green or red everywhere.
settings.register_profile(
    "contbatch",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("contbatch")
