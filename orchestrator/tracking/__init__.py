"""Carries what trials report into MLflow's tables. Judges nothing, and never decides which trial runs.

MLflow reads these variables once, when it is imported, so they are set here: whoever imports one of our tracking
modules has passed through this file before MLflow loads. A variable the user has set is left as it is.
"""

from __future__ import annotations

import os

# Telemetry off: mlflow/telemetry/utils.py, `is_telemetry_disabled`. The level silences one INFO line per migration.
for name, value in {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
    os.environ.setdefault(name, value)
