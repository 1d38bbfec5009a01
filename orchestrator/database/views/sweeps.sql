-- orch.sweeps: one row a sweep; archived sweeps are left out of this and of all other views.
--
--   sweep, workload, state   state: created, running, finished, interrupted (also by its time budget, or because its
--                            command died), cancelled, failed
--   trials                   all its trials so far, whatever their state
--   finished .. waiting      trials in that state; the eight add up to `trials`
--   started_at, ended_at     null: not started; not ended, or running again
--   seconds                  sum over its trials of orch.runs.seconds: time of training, not of waiting
--   metric, mode             the objective, and whether its minimum or its maximum is wanted
--   experiment_id            MLflow's; null until there is one
--   description, tags, created_at   the head comment of the file; its tags; when the sweep was made
--   spec                     the resolved file: params with their domains, axes in the order of the file, search, ...
--   holder, heartbeat_at     `<pid>@<host>` of the command that drives it, and its last word; null: nobody does
create view orch.sweeps as
select
    sweep.name as sweep,
    sweep.workload,
    sweep.state,
    count(run.trial) as trials,
    count(run.trial) filter (where run.state = 'finished') as finished,
    count(run.trial) filter (where run.state = 'diverged') as diverged,
    count(run.trial) filter (where run.state = 'failed') as failed,
    sweep.started_at,
    sweep.ended_at,
    count(run.trial) filter (where run.state = 'stopped') as stopped,
    count(run.trial) filter (where run.state = 'killed') as killed,
    count(run.trial) filter (where run.state = 'lost') as lost,
    count(run.trial) filter (where run.state = 'running') as running,
    count(run.trial) filter (where run.state = 'waiting') as waiting,
    coalesce(sum(run.seconds), 0) as seconds,
    sweep.metric,
    sweep.mode,
    sweep.experiment_id,
    sweep.description,
    sweep.tags,
    sweep.created_at,
    sweep.spec,
    case when sweep.heartbeat_at is not null then nullif(sweep.holder, '') end as holder,
    case when sweep.holder <> '' then sweep.heartbeat_at end as heartbeat_at
from orch_ledger.sweeps as sweep
left join orch.runs as run on run.sweep = sweep.name
where sweep.archived_at is null
group by sweep.id
