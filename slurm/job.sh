# What the batch scripts share: `source slurm/job.sh; train OVERRIDE…`. Runs in the directory that sbatch was called in.
#
# Before the time limit Slurm sends USR1 to the batch script alone (--signal=B:USR1@…): the script passes it to node.sh on every
# node, that to the workers; they agree on a step, write a checkpoint and end, and the script puts the job back into the queue.
# A job that is preempted with a grace time gets TERM in its steps only, and one that then ends in time is over for Slurm:
# node.sh tells the batch script, and all goes on as above. After `scancel` the batch script is gone: nothing is requeued.
# The job's number is the same after a requeue, so the same run directory, and the same wandb run, are found again.
# Where NCCL or a profiler uses USR1 in the workers: STOP_SIGNAL=USR2 sbatch … (node.sh and the trainer follow it).
set -euo pipefail

export STOP_SIGNAL=${STOP_SIGNAL:-USR1}
stopping=
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job=${job:-$SLURM_JOB_ID}

pass_on() {
    stopping=1
    scancel --signal="$STOP_SIGNAL" "$SLURM_JOB_ID.0" || true # step 0: the one srun below
}

train() {
    local overrides=("$@")
    [[ " ${overrides[*]} " =~ " run."(name|dir)"=" ]] || overrides+=("run.name=$SLURM_JOB_NAME-$job")
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from sbatch, since Slurm 22.05
    trap pass_on USR1
    echo "job $job, start ${SLURM_RESTART_COUNT:-0}, nodes $SLURM_JOB_NODELIST: ${overrides[*]}"
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash slurm/node.sh "${overrides[@]}" &
    local step=$! code=0
    while kill -0 "$step" 2>/dev/null; do # a trapped signal ends `wait`, not the step
        wait "$step" && code=0 || code=$?
    done
    if [[ $stopping && $code == 0 ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
