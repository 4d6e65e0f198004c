#!/usr/bin/env bash
# The real batch scripts under a real Slurm on this machine, as two nodes, scaled down to CPUs: jobs that are stopped before their
# time limit on one node and on two, preempted and cancelled, and an array. Installs and starts Debian's slurm-wlm and munge: needs root, and ALLOW_INSTALL=1.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ ${ALLOW_INSTALL:-} != 1 || $(id -u) != 0 ]]; then
    echo "test-slurm installs and starts Slurm on this machine; run it as root with ALLOW_INSTALL=1 where that may be" >&2
    exit 2
fi
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null
fi

work=$(mktemp -d)
host=$(hostname -s)
mkdir -p "$work"/{state,spool,log}
cat >"$work/slurm.conf" <<EOF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/log/slurmctld.log
SlurmdLogFile=$work/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=5
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=one NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=8 RealMemory=1000 Gres=gpu:8
NodeName=two NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=8 RealMemory=1000 Gres=gpu:8
PartitionName=low Nodes=one,two Default=YES PriorityTier=1 MaxTime=INFINITE State=UP GraceTime=30
PartitionName=high Nodes=one,two PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF
EOF
for i in 0 1 2 3 4 5 6 7; do mknod "$work/gpu$i" c 1 3; done # devices for Slurm to count; nothing uses them
echo "NodeName=one,two Name=gpu File=$work/gpu[0-7]" >"$work/gres.conf"
export SLURM_CONF=$work/slurm.conf

finish() {
    code=$?
    scancel --user=root 2>/dev/null || true
    local pids
    pids=$(cat "$work"/*.pid 2>/dev/null)
    kill $pids 2>/dev/null || true
    tail --pid="${pids##*$'\n'}" -f /dev/null # it writes its state at the end
    if [[ $code != 0 ]]; then tail -n 30 "$work"/log/* "$work"/*.out 2>/dev/null || true; fi
    rm -rf "$work" runs/slurm-test-*
    exit "$code"
}
trap finish EXIT

if ! munge -n >/dev/null 2>&1; then
    mkdir -p /run/munge && chown munge: /run/munge
    [[ -f /etc/munge/munge.key ]] || runuser -u munge -- mungekey
    runuser -u munge -- munged --force
fi
slurmctld
slurmd -N one
slurmd -N two
for _ in $(seq 30); do sinfo -h -o %t 2>/dev/null | grep -q idle && break || sleep 1; done

small=(model.num_layers=2 model.num_heads=2 model.embed_dim=32 model.block_size=32 train.micro_batch_size=2
    train.global_batch_size=8 train.eval_every=1000 train.eval_batches=2 train.precision=fp64 optim.warmup_steps=3 device=cpu
    train.log_every=10)
submit() { # workers on a node, OPTION… -- OVERRIDE…: the job's number
    local workers=$1 options=() && shift
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    MASTER_ADDR=127.0.0.1 WORKERS_PER_NODE=$workers OMP_NUM_THREADS=1 WANDB_MODE=offline \
        sbatch --parsable --cpus-per-task=2 --time=30 --output="$work/%x-%j.out" "${options[@]}" "${@:2}" "${small[@]}"
}
steps() { cat "$1/metrics.jsonl" 2>/dev/null | wc -l; }
wait_for() { # seconds, command…
    for _ in $(seq $(($1 * 5))); do "${@:2}" && return || sleep 0.2; done
    echo "waited $1 s for: ${*:2}" >&2 && return 1
}
has_steps() { (($(steps "$1") >= $2)); }
state() { scontrol show job "$1" -o | grep -o 'JobState=[A-Z]*' | cut -d= -f2; }
is() { [[ $(state "$1") == "$2" ]]; }
start_now() { # a requeued job waits two minutes otherwise; in the second of its end slurmd still takes it for the killed one
    sleep 3 && scontrol update JobId="$1" StartTime=now
}
every_step_once() { # run directory, steps
    .venv/bin/python - "$1" "$2" <<'EOF'
import json, sys
steps = [json.loads(line)["step"] for line in open(f"{sys.argv[1]}/metrics.jsonl")]
assert steps == list(range(1, int(sys.argv[2]) + 1)), steps
EOF
}
restarts() { scontrol show job "$1" -o | grep -o 'Restarts=[0-9]*' | cut -d= -f2; }

echo "== stopped before its time limit: checkpoint, requeue, the same run goes on"
job=$(submit 2 --job-name=slurm-test-stop slurm/one_node.sbatch -- arm=sophia-flashbob train.max_steps=400 \
    train.checkpoint_every=0 logger=wandb logger.mode=offline)
run=runs/slurm-test-stop-$job
wait_for 90 has_steps "$run" 20
scancel --batch --signal=USR1 "$job" # what --signal=B:USR1@300 does
wait_for 60 is "$job" PENDING
stopped=$(steps "$run")
((stopped >= 20 && stopped < 400))
id=$(cat "$run/wandb_id")
start_now "$job"
wait_for 180 is "$job" COMPLETED
[[ $(restarts "$job") == 1 && $(cat "$run/wandb_id") == "$id" ]]
grep -q "stopped by signal 10 after step $stopped with a checkpoint" "$work/slurm-test-stop-$job.out"
grep -q "continues after step $stopped" "$work/slurm-test-stop-$job.out"
every_step_once "$run" 400

echo "== two nodes, stopped and requeued: the losses of one process that was not"
job=$(submit 1 --job-name=slurm-test-two slurm/nodes.sbatch -- arm=sophia-math train.max_steps=60 \
    train.checkpoint_every=0)
run=runs/slurm-test-two-$job
wait_for 90 has_steps "$run" 15
scancel --batch --signal=USR1 "$job"
.venv/bin/python train.py arm=sophia-math train.max_steps=60 run.name=slurm-test-single "${small[@]}" >/dev/null
wait_for 60 is "$job" PENDING
stopped=$(steps "$run")
start_now "$job"
wait_for 120 is "$job" COMPLETED
grep -q "on 2 × cpu.*continues after step $stopped" "$work/slurm-test-two-$job.out"
every_step_once "$run" 60
.venv/bin/python - "$run" runs/slurm-test-single <<'EOF'
import json, math, sys
a, b = ([json.loads(line)["train/loss"] for line in open(f"{run}/metrics.jsonl")] for run in sys.argv[1:])
assert all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a, b, strict=True)), list(zip(a, b))
EOF

echo "== preempted by a partition of higher priority: a checkpoint in the grace time, and on when there is room"
job=$(submit 2 --nodelist=one --job-name=slurm-test-low --gpus-per-node=8 slurm/one_node.sbatch -- arm=adamw train.max_steps=600 train.checkpoint_every=0)
run=runs/slurm-test-low-$job
wait_for 90 has_steps "$run" 20
other=$(submit 2 --nodelist=one --job-name=slurm-test-high --partition=high --gpus-per-node=8 slurm/one_node.sbatch -- arm=adamw train.max_steps=5)
wait_for 120 is "$other" COMPLETED
wait_for 30 is "$job" PENDING
stopped=$(steps "$run")
((stopped < 600))
start_now "$job"
wait_for 180 is "$job" COMPLETED
grep -q "continues after step $stopped" "$work/slurm-test-low-$job.out"
every_step_once "$run" 600

echo "== scancel: a checkpoint too, and the job stays cancelled"
job=$(submit 2 --job-name=slurm-test-cancel slurm/one_node.sbatch -- arm=adamw train.max_steps=600 train.checkpoint_every=0)
wait_for 90 has_steps "runs/slurm-test-cancel-$job" 20
scancel "$job"
wait_for 60 grep -q "stopped by signal" "$work/slurm-test-cancel-$job.out"
wait_for 60 is "$job" CANCELLED
sleep 5
is "$job" CANCELLED

echo "== an array: arms, each with a run of its own"
array=$(submit 2 --job-name=slurm-test-arms --array=0,4 --gpus-per-node=1 slurm/arms.sbatch -- train.max_steps=6)
for task in 0 4; do
    wait_for 120 is "${array}_$task" COMPLETED
    every_step_once "runs/slurm-test-arms-${array}_$task" 6
done
grep -q "arm: sophia-flashbob" "runs/slurm-test-arms-${array}_4/config.yaml"

echo "slurm: all passed"
