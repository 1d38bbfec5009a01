-- orch.stability: one row a sweep and cell; a cell is a combination of the grid axes without the seed.
--
--   cell                   jsonb, {} for a sweep without a grid
--   n                      trials with a result (finished, stopped, diverged) of which orch.runs.unstable is known.
--                          Waiting, running, failed, killed and lost trials say nothing about the cell
--   diverged               how many of the n diverged
--   unstable               how many of the n are unstable: diverged, or beyond what the sweep's `unstable` says
--   share                  unstable / n; null while n is 0
--   low, high              95 % Wilson score interval of the share, within 0..1; null while n is 0
--   unknown                results that are not in n: orch.runs.unstable is null, see there
--
-- Wilson (1927), z = 1.959963984540054: sound at shares of 0 and 1 and at n = 3, where p +- 1.96 s.e. is not.
create view orch.stability as
select
    counted.sweep,
    counted.cell,
    counted.n,
    counted.diverged,
    counted.unstable,
    rate.share,
    case
        when counted.unstable = 0 and counted.n > 0 then 0
        else (rate.share + rate.z2 / 2 - rate.half) / (1 + rate.z2)
    end as low,
    case
        when counted.unstable = counted.n and counted.n > 0 then 1
        else (rate.share + rate.z2 / 2 + rate.half) / (1 + rate.z2)
    end as high,
    counted.unknown
from (
    select
        run.sweep,
        run.cell,
        count(run.unstable) as n,
        count(*) filter (where run.state = 'diverged') as diverged,
        count(*) filter (where run.unstable) as unstable,
        count(*) filter (where run.state in ('finished', 'stopped') and run.unstable is null) as unknown
    from orch.runs as run
    group by run.sweep, run.cell
) as counted
cross join lateral (
    select
        share.share,
        share.z2,
        sqrt(share.z2 * (share.share * (1 - share.share) + share.z2 / 4)) as half
    from (
        select
            counted.unstable::double precision / nullif(counted.n, 0) as share,
            1.959963984540054 ^ 2 / nullif(counted.n, 0)::double precision as z2  -- z squared over n
    ) as share
) as rate
