"""Whether an experiment's name can be a sweep's, asked by SQL: a command learns it without importing MLflow."""

from __future__ import annotations

from typing import Any

import psycopg

from orchestrator.errors import AlreadyExists

SWEEP_TAG = "orch.sweep"  # an experiment that carries it is ours


def refuse_unusable(name: str, experiment_id: object, is_deleted: bool, is_ours: bool, masked_uri: str) -> None:
    """Raises AlreadyExists, with the ways out, for a deleted experiment or one of somebody else."""
    if is_deleted:
        raise AlreadyExists(
            f"MLflow's experiment {name!r} was deleted, and MLflow keeps its name taken. Two ways out:\n"
            f"  restore it:   MLFLOW_TRACKING_URI={masked_uri} "
            f"mlflow experiments restore --experiment-id {experiment_id}\n"
            "  another name: run the sweep again with --name NAME"
        )
    if not is_ours:
        raise AlreadyExists(
            f"MLflow already has an experiment {name!r}, and it is not a sweep of orch (no tag {SWEEP_TAG}).\n"
            "give the sweep another name with --name NAME, or rename that experiment in MLflow"
        )


def check_experiment_name(connection: psycopg.Connection[Any], name: str, masked_uri: str) -> None:
    """Raises AlreadyExists when MLflow has an experiment of that name which a sweep may not use."""
    row = connection.execute(
        """
        select experiment_id, lifecycle_stage <> 'active',
               exists (select from public.experiment_tags as tag
                       where tag.experiment_id = experiment.experiment_id and tag.key = %s)
        from public.experiments as experiment where name = %s
        """,
        (SWEEP_TAG, name),
    ).fetchone()
    if row is not None:
        experiment_id, is_deleted, is_ours = row
        refuse_unusable(name, experiment_id, is_deleted, is_ours, masked_uri)
