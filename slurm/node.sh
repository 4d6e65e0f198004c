#!/bin/bash
# On every node: torchrun, with signals for its workers. torchrun itself must not act on them (USR1 kills its agent and orphans
# the workers; TERM has it kill them after 30 s), and how far Slurm spreads a signal depends on the site: to this script alone
# (proctrack/cgroup) or to every process below it (proctrack/linuxproc). So torchrun ignores both, and the workers, which
# inherit that until they have their own handlers, get them from here again and again until they have ended.
set -uo pipefail

workers=${WORKERS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that are started again find the addresses of dead ones
trap '' "$STOP_SIGNAL" TERM
torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$workers" --max-restarts="${MAX_RESTARTS:-0}" \
    --signals-to-handle=SIGINT,SIGHUP,SIGQUIT \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    train.py "$@" &
agent=$!
stopping=
trap 'stopping=$STOP_SIGNAL' "$STOP_SIGNAL"
trap 'stopping=TERM; scancel --batch --signal=USR1 "$SLURM_JOB_ID" 2>/dev/null' TERM # tell the batch script: see job.sh
while kill -0 "$agent" 2>/dev/null; do
    [[ -n $stopping ]] && pkill -"$stopping" -P "$agent"
    sleep 2 & # a signal ends `wait`, and not a `sleep` in the foreground
    wait -n "$agent" $!
done
wait "$agent"
