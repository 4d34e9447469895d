"""Reproducible runs: the same examples each time; HYPOTHESIS_PROFILE=search looks for new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink), **COMMON)
settings.register_profile("search", max_examples=5000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
