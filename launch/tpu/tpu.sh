#!/usr/bin/env bash
# Runs on Cloud TPU slices: TPU VMs (queued resources) or, with --gke, a JobSet on a GKE cluster through xpk.
#
#   launch/tpu/tpu.sh create --name=seed --zone=us-west4-a --topology=v5e:4x4 [--spot] [--model=qwen2.5-3b] -- CONFIG
#   launch/tpu/tpu.sh run    --name=seed --zone=us-west4-a --topology=v5e:4x4 --workdir=DIR -- CONFIG
#   launch/tpu/tpu.sh resume ...       as `run`: training goes on where its workdir stands
#   launch/tpu/tpu.sh logs   --name=seed --zone=us-west4-a [--worker=0 | all]
#   launch/tpu/tpu.sh delete --name=seed --zone=us-west4-a
#   ... --gke --cluster=CLUSTER [--image=IMAGE]    the same subcommands on GKE; IMAGE holds this code and its packages
#
# DIR is seen by all workers (a mounted bucket or share). CONFIG is what launch.train gets:
# --config=configs/alfworld.py:seed --config.model.init=... --config.FIELD=VALUE ...
# --dry_run prints the exact commands and runs nothing. `create`, `run` and `resume` first ask launch.compile_check
# whether CONFIG fits the slice, and refuse if not; --force goes on. --model names the sizes where model.init is no
# directory here. --max_hours=N (24): a request that is not filled by then ends; training stops then, and saves.
# A slice costs money until `delete`. After a preemption (spot): `delete`, `create`, `resume`.
#
# Syntax: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create
#         https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
#         https://cloud.google.com/tpu/docs/queued-resources
#         https://github.com/AI-Hypercomputer/xpk/blob/main/docs/usage/workloads.md and clusters.md
set -euo pipefail

usage() { sed -n '2,22s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
fail() { echo "error: $*" >&2; exit 2; }

SUBCOMMAND="${1:-}"
[ $# -gt 0 ] && shift
case "$SUBCOMMAND" in
  create | run | resume | logs | delete) ;;
  -h | --help | help) usage; exit 0 ;;
  "") usage >&2; exit 2 ;;
  *) fail "unknown subcommand '$SUBCOMMAND'; use create, run, resume, logs or delete" ;;
esac

NAME="" ZONE="" PROJECT="" TOPOLOGY="" MODEL="" WORKDIR="" WORKER=0 SPOT=0 DRY_RUN=0 FORCE=0 MAX_HOURS=24 GKE=0 CLUSTER="" IMAGE=""
GRACE_S=300 # checkpoint.grace_s: seconds from SIGTERM to the end, in which a run saves
CODE_DIR="seed-jax" PYTHON="${PYTHON:-python}"
TRAIN_ARGS=()
while [ $# -gt 0 ]; do
  case "$1" in
    --name=*) NAME="${1#*=}" ;;
    --zone=*) ZONE="${1#*=}" ;;
    --project=*) PROJECT="${1#*=}" ;;
    --topology=*) TOPOLOGY="${1#*=}" ;;
    --model=*) MODEL="${1#*=}" ;;
    --workdir=*) WORKDIR="${1#*=}" ;;
    --worker=*) WORKER="${1#*=}" ;;
    --max_hours=*) MAX_HOURS="${1#*=}" ;;
    --cluster=*) CLUSTER="${1#*=}" ;;
    --image=*) IMAGE="${1#*=}" ;;
    --gke) GKE=1 ;;
    --spot) SPOT=1 ;;
    --dry_run) DRY_RUN=1 ;;
    --force) FORCE=1 ;;
    --) shift; TRAIN_ARGS=("$@"); break ;;
    *) fail "unknown option '$1'; arguments of the training go behind --" ;;
  esac
  shift
done

need() { [ -n "$2" ] || fail "$SUBCOMMAND needs $1"; }

# Prints a command so that a shell would read it back as it is, and runs it unless this is a dry run.
run_command() {
  quoted "$@"
  echo
  [ "$DRY_RUN" = 1 ] || "$@"
}

# Quotes words for a command line that another shell will read.
quoted() {
  local line
  line="$(printf '%q ' "$@")"
  printf '%s' "${line% }"
}

# v5e:4x4 -> v5litepod-16. The number behind v5p counts TensorCores, two a chip; behind the others, chips.
accelerator_type() {
  local kind="${TOPOLOGY%%:*}" grid="${TOPOLOGY#*:}" chips
  [[ "$grid" =~ ^[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?$ ]] || fail "--topology=$TOPOLOGY is not KIND:GRID such as v5e:4x4"
  chips=$((${grid//x/*}))
  case "$kind" in
    v5e) echo "v5litepod-$chips" ;;
    v5p) echo "v5p-$((2 * chips))" ;;
    v6e) echo "v6e-$chips" ;;
    *) fail "--topology=$TOPOLOGY: unknown kind '$kind'; use v5e, v5p or v6e" ;;
  esac
}

runtime_version() {
  case "${TOPOLOGY%%:*}" in
    v5e) echo v2-alpha-tpuv5-lite ;;
    v5p) echo v2-alpha-tpuv5 ;;
    v6e) echo v2-alpha-tpuv6e ;;
  esac
}

# The arguments of the training that decide what is compiled: its config. Others (--overwrite) are not the check's.
config_args() {
  local arg
  for arg in "${TRAIN_ARGS[@]}"; do
    case "$arg" in --config=* | --config.*) printf '%s\0' "$arg" ;; esac
  done
}

# Refuses to spend money on a run that does not fit.
check_fits() {
  local args=()
  mapfile -d '' -t args < <(config_args)
  [ -z "$MODEL" ] || args=("--model=$MODEL" "${args[@]}")
  if [ "$FORCE" = 1 ]; then
    echo "# compile_check is skipped (--force)"
    return
  fi
  local status=0
  run_command "$PYTHON" -m launch.compile_check --strict "--topology=$TOPOLOGY" "${args[@]}" || status=$?
  case "$status" in
    0) ;;
    1) echo "error: the run does not fit $TOPOLOGY; change what is said above, or --force" >&2; exit 1 ;;
    *) echo "error: compile_check could not tell whether the run fits; see above, or --force" >&2; exit "$status" ;;
  esac
}

SCOPE=()
set_scope() {
  need --name "$NAME"
  [[ "$MAX_HOURS" =~ ^[1-9][0-9]*$ ]] || fail "--max_hours=$MAX_HOURS must be a whole number of hours, 1 or more"
  if [ "$GKE" = 1 ]; then
    need --cluster "$CLUSTER"
    [[ "$NAME" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ && ${#NAME} -le 40 ]] ||
      fail "--name=$NAME: a workload is named with a-z, 0-9 and -, at most 40 of them"
    SCOPE=("--cluster=$CLUSTER")
  else
    need --zone "$ZONE"
    SCOPE=()
  fi
  [ -z "$ZONE" ] || SCOPE+=("--zone=$ZONE")
  [ -z "$PROJECT" ] || SCOPE+=("--project=$PROJECT")
}

on_workers() { # on_workers WORKER COMMAND
  run_command gcloud compute tpus tpu-vm ssh "$NAME" "${SCOPE[@]}" "--worker=$1" "--command=$2"
}

# On every worker: the code with its packages, and a place on the local disk where compiled programs are kept.
set_up_workers() {
  local archive
  archive="${TMPDIR:-/tmp}/seed-jax-code.tar.gz"
  run_command git archive --format=tar.gz --prefix="$CODE_DIR/" --output="$archive" HEAD
  run_command gcloud compute tpus tpu-vm scp "$archive" "$NAME:seed-jax-code.tar.gz" "${SCOPE[@]}" --worker=all
  on_workers all "tar -xzf seed-jax-code.tar.gz && python3 -m venv --system-site-packages $CODE_DIR/.venv \
&& $CODE_DIR/.venv/bin/pip install --quiet -U 'jax[tpu]' -r $CODE_DIR/requirements.txt && mkdir -p \$HOME/.cache/seed_jax/xla"
}

# A local disk, not a bucket: reading compiled programs from gs:// has been slower than compiling them anew.
training() {
  echo "env JAX_COMPILATION_CACHE_DIR=\$HOME/.cache/seed_jax/xla timeout --signal=TERM ${MAX_HOURS}h" \
    "$1 -m launch.train $(quoted "--workdir=$WORKDIR" "${TRAIN_ARGS[@]}")"
}

create() {
  need --topology "$TOPOLOGY"
  local accelerator
  accelerator="$(accelerator_type)"
  check_fits
  if [ "$GKE" = 1 ]; then
    local capacity=--on-demand
    [ "$SPOT" = 0 ] || capacity=--spot
    run_command xpk cluster create "${SCOPE[@]}" "--tpu-type=$accelerator" --num-slices=1 "$capacity"
    return
  fi
  local request=(gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${SCOPE[@]}"
    "--accelerator-type=$accelerator" "--runtime-version=$(runtime_version)" "--valid-until-duration=${MAX_HOURS}h")
  [ "$SPOT" = 0 ] || request+=(--spot)
  run_command "${request[@]}"
  echo "# wait until it is ACTIVE:"
  run_command gcloud compute tpus queued-resources describe "$NAME" "${SCOPE[@]}" "--format=value(state.state)"
}

train() {
  need --topology "$TOPOLOGY"
  need --workdir "$WORKDIR"
  local accelerator
  accelerator="$(accelerator_type)"
  check_fits
  if [ "$GKE" = 1 ]; then
    need --image "$IMAGE"
    # xpk starts a JobSet again after the codes 42 and 127-255 only (killed, crashed); 75 is a host that has lost another.
    local request=(xpk workload create "--workload=$NAME" "${SCOPE[@]}" "--tpu-type=$accelerator" --num-slices=1
      "--docker-image=$IMAGE" --max-restarts=50 --restart-on-exit-codes=75 "--termination-grace-period-seconds=$GRACE_S")
    [ "$SUBCOMMAND" = run ] || request+=(--quiet) # takes the place of the old workload of that name without asking
    run_command "${request[@]}" "--command=$(training python3)"
    return
  fi
  set_up_workers
  on_workers all "cd $CODE_DIR && nohup $(training .venv/bin/python) > ../train.log 2>&1 < /dev/null &"
}

logs() {
  if [ "$GKE" = 1 ]; then
    local pods="jobset.sigs.k8s.io/jobset-name=$NAME"
    [ "$WORKER" = all ] || pods+=",batch.kubernetes.io/job-completion-index=$WORKER"
    run_command kubectl logs --follow --all-containers --prefix --tail=100 --max-log-requests=256 "--selector=$pods"
  else
    on_workers "$WORKER" "tail -n 100 -F train.log"
  fi
}

delete() {
  if [ "$GKE" = 1 ]; then
    run_command xpk workload delete "--workload=$NAME" "${SCOPE[@]}"
    echo "# the cluster's nodes cost money until: xpk cluster delete $(quoted "${SCOPE[@]}")"
  else
    run_command gcloud compute tpus queued-resources delete "$NAME" "${SCOPE[@]}" --force --quiet
  fi
}

set_scope
case "$SUBCOMMAND" in
  create) create ;;
  run | resume) train ;;
  logs) logs ;;
  delete) delete ;;
esac
