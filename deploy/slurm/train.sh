#!/usr/bin/env bash
# Train on a Slurm cluster: a Ray head on the first node, Ray workers on the others, `strop train` beside the head.
#
#   sbatch --nodes=4 deploy/slurm/train.sh recipe.toml --set loop.steps=500
#
# Before the time limit the run is stopped after the step it is at, with a checkpoint, and the job is queued again; its
# next start resumes the run. README.md beside this file says what may be set.
#
#SBATCH --job-name=strop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
set -m # jobs in the background get SIGINT: without job control a shell has them ignore it

die() {
    echo "train.sh: $*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is no Slurm job. Fix: sbatch deploy/slurm/train.sh RECIPE.toml"
[ $# -ge 1 ] || die "which recipe? Fix: sbatch deploy/slurm/train.sh RECIPE.toml"
recipe=$1
shift
for program in strop ray; do
    command -v "$program" >/dev/null ||
        die "$program is not on PATH. Fix: activate its environment, on a file system that all nodes share, before sbatch"
done

# The job keeps its number when it is queued again, and so its run.
run=${STROP_RUN:-${SLURM_SUBMIT_DIR:-$PWD}/runs/${SLURM_JOB_NAME:-strop}-$SLURM_JOB_ID}
[ -e "$run/config.json" ] || [ -f "$recipe" ] || die "there is no $recipe. Fix: give the path of a recipe in TOML"
mkdir -p "$(dirname "$run")" || die "$(dirname "$run") cannot be made. Fix: set STROP_RUN to a folder on a shared file system"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#nodes[@]}" -ge 1 ] || die "scontrol names no nodes for $SLURM_JOB_NODELIST. Fix: see what Slurm says of the job"
head=${nodes[0]}

on() { # on NODE COMMAND...: a step of its own on one node, beside others there
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap --kill-on-bad-exit=0 "$@"
}

for node in "${nodes[@]:1}"; do
    on "$node" test -d "$(dirname "$run")" ||
        die "$node does not see $(dirname "$run"). Fix: set STROP_RUN to a folder on a file system that all nodes share"
done

# Ports follow from the job's number, so that two jobs on one node do not meet: twenty for each.
port=$((20000 + SLURM_JOB_ID % 1000 * 20))
said=$(on "$head" hostname --ip-address) || die "the address of $head is not known. Fix: see whether srun works there"
ip=${said%% *}
for word in $said; do # the first that other nodes can reach
    case $word in
        127.* | *:*) ;;
        *) ip=$word && break ;;
    esac
done
address=$ip:$port
resources=()
[ -n "${SLURM_CPUS_ON_NODE:-}" ] && resources+=("--num-cpus=$SLURM_CPUS_ON_NODE")
[ -n "${SLURM_GPUS_ON_NODE:-}" ] && resources+=("--num-gpus=$SLURM_GPUS_ON_NODE")
fixed=("--node-manager-port=$((port + 1))" "--object-manager-port=$((port + 2))")
export RAY_USAGE_STATS_ENABLED=0

steps=()
train=
stopping=

# shellcheck disable=SC2317 # traps call these
end_cluster() {
    local left alive
    for left in "${steps[@]}"; do kill -TERM -- "-$left" 2>/dev/null; done # its process group: a shell, srun, its step
    for _ in {1..300}; do
        alive=
        for left in "${steps[@]}"; do kill -0 -- "-$left" 2>/dev/null && alive=yes; done
        [ -n "$alive" ] || break
        sleep 0.1
    done
    for left in "${steps[@]}"; do kill -KILL -- "-$left" 2>/dev/null; done
    rm -rf "/tmp/ray-$SLURM_JOB_ID"
}

# shellcheck disable=SC2317
stop_in_time() { # the time limit is near
    stopping=limit
    echo "train.sh: the time limit is near: the run stops after this step, and the job is queued again"
    [ -z "$train" ] || kill -INT "$train" 2>/dev/null
}

# shellcheck disable=SC2317
stop_now() { # scancel, or another job takes the nodes: Slurm queues the job again if it should be
    stopping=now
    [ -z "$train" ] || kill -TERM "$train" 2>/dev/null
}

trap stop_in_time USR1
trap stop_now TERM
trap end_cluster EXIT

on "$head" ray start --head --block "--node-ip-address=$ip" "--port=$port" "${fixed[@]}" "${resources[@]}" \
    --ray-client-server-port=$((port + 3)) --include-dashboard=false "--temp-dir=/tmp/ray-$SLURM_JOB_ID" &
steps+=($!)

wait_for_nodes() { # until so many have joined, or for so many seconds
    local count=$1 deadline=$((SECONDS + ${STROP_START_SECONDS:-300}))
    until [ "$(ray status "--address=$address" 2>/dev/null | grep -cE '^ *[0-9]+ node_')" -ge "$count" ]; do
        [ -z "$stopping" ] || exit 0
        kill -0 "${steps[0]}" 2>/dev/null || die "the Ray head on $head has ended. Fix: see above for its last words"
        [ $SECONDS -lt $deadline ] ||
            die "fewer than $count nodes have joined $address. Fix: see above what those that are missing said"
        sleep 1
    done
}

wait_for_nodes 1
for node in "${nodes[@]:1}"; do # a step each: one that is lost takes no other with it
    on "$node" ray start --block "--address=$address" "${fixed[@]}" "${resources[@]}" &
    steps+=($!)
done
wait_for_nodes "${#nodes[@]}"

# Keys reach strop through the environment (STROP_KEY, provider keys): arguments can be read by every user of a node.
if [ -e "$run/config.json" ]; then
    strop train --resume "$run" --cluster "$address" &
else
    strop train --config "$recipe" --folder "$run" --cluster "$address" "$@" &
fi
train=$!
case $stopping in # a signal that came before there was anything to stop
    limit) kill -INT "$train" ;;
    now) kill -TERM "$train" ;;
esac

wait "$train"
code=$?
while kill -0 "$train" 2>/dev/null; do # a signal ends the first wait, not the run
    wait "$train"
    code=$?
done

if [ "$stopping" = limit ] && [ $code -ne 0 ] && [ -e "$run/config.json" ]; then
    end_cluster
    trap - EXIT
    echo "train.sh: $run goes on when the job starts again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $code
