"""The indexes of MLflow's tables on which our statements and views lean, as MLflow's own models define them.

Written down, since importing those models takes longer than everything else that looks for them; a test compares.
"""

from __future__ import annotations

NEEDED = {
    "metric_pk": "alter table public.metrics add constraint metric_pk "
    "primary key (key, timestamp, step, run_uuid, value, is_nan)",
    "index_metrics_run_uuid": "create index index_metrics_run_uuid on public.metrics (run_uuid)",
    "index_metrics_run_uuid_key_step": "create index index_metrics_run_uuid_key_step "
    "on public.metrics (run_uuid, key, step)",
    "latest_metric_pk": "alter table public.latest_metrics add constraint latest_metric_pk primary key (key, run_uuid)",
    "index_latest_metrics_run_uuid": "create index index_latest_metrics_run_uuid on public.latest_metrics (run_uuid)",
    "run_pk": "alter table public.runs add constraint run_pk primary key (run_uuid)",
    "tag_pk": "alter table public.tags add constraint tag_pk primary key (key, run_uuid)",
    "index_tags_run_uuid": "create index index_tags_run_uuid on public.tags (run_uuid)",
    "param_pk": "alter table public.params add constraint param_pk primary key (key, run_uuid)",
    "index_params_run_uuid": "create index index_params_run_uuid on public.params (run_uuid)",
}
"""Index -> the statement that makes it."""
