#!/usr/bin/env bash
# What a container of docker-compose.yml does: `mlflow`, `ray-head`, `ray-worker`, or one `orch` command.
# Waits for what it needs, since not every compose runtime honours health conditions. Keeps no secret on a command line.
set -euo pipefail

WAIT_S=${START_WAIT_S:-90}
OBJECT_STORE_BYTES=100000000 # trials pass a few kilobytes through it

wait_for_database() {
  # A database that stays away is explained by the command that needs it, in one block.
  python /usr/local/lib/orch/wait_for_database.py || true
}

wait_for_head() {
  local deadline=$((SECONDS + WAIT_S))
  until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do
    if ((SECONDS > deadline)); then
      echo "no Ray head answers at $RAY_ADDRESS within $WAIT_S s; look at: docker compose logs ray-head" >&2
      exit 2
    fi
    sleep 1
  done
}

serve_mlflow() {
  wait_for_database
  orch up --no-ui # the tables first, under the advisory lock, so that MLflow's server finds them ready
  export MLFLOW_BACKEND_STORE_URI=$ORCH_DATABASE_URL
  exec mlflow server --host 0.0.0.0 --port 5000 --workers 1 --artifacts-destination "$ORCH_ARTIFACT_ROOT"
}

serve_ray() {
  exec ray start "$@" --object-store-memory "$OBJECT_STORE_BYTES" --disable-usage-stats --block
}

# A Ray driver needs a Ray node in its own container. This one offers no CPU, so no trial lands here.
join_cluster() {
  wait_for_head
  ray start --address "$RAY_ADDRESS" --num-cpus 0 --num-gpus 0 --object-store-memory "$OBJECT_STORE_BYTES" \
    --disable-usage-stats >/dev/null
}

# Runs the command in a process group of its own, so that each signal reaches it exactly once, through us: for `orch` a
# second one means "at once". Afterwards the node leaves the cluster in order.
run_as_node() {
  local status
  set -m
  "$@" &
  local command=$!
  set +m
  trap 'kill -INT "$command"' INT
  trap 'kill -TERM "$command"' TERM
  while true; do
    status=0
    wait "$command" || status=$?
    kill -0 "$command" 2>/dev/null || break
  done
  trap - INT TERM
  ray stop --grace-period 5 >/dev/null 2>&1 || echo "this container's Ray node did not stop in order" >&2
  return "$status"
}

needs_cluster() {
  [[ ${1:-} == sweep || ${1:-} == resume ]] || return 1
  local word
  for word in "$@"; do
    case $word in --inline | --detach | --dry-run | --help | -h) return 1 ;; esac
  done
}

run_orch() {
  case ${1:-} in
    "" | -* | plan | workloads) exec orch "$@" ;; # these need no database
  esac
  wait_for_database
  needs_cluster "$@" || exec orch "$@"
  join_cluster
  run_as_node orch "$@"
}

case ${1:-} in
  mlflow) serve_mlflow ;;
  ray-head) serve_ray --head --port 6379 --num-cpus 0 --dashboard-host 0.0.0.0 ;; # published on the loopback only
  ray-worker)
    wait_for_head
    serve_ray --address "$RAY_ADDRESS" --num-cpus "${WORKER_CPUS:-2}"
    ;;
  orch) run_orch "${@:2}" ;;
  *) exec "$@" ;;
esac
