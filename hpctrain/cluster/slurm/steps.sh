# shellcheck shell=bash disable=SC2154 # the script sets $run, $job and $nodes
# The ranks run in steps of this job, one step after another, until the run ends or needs the queue:
#   ranks OPTION...          starts them by srun with these options, as `sh -c "$start" rank …`
#   verdict RUN CODE STEP    answers what becomes of the job (hpctrain.engine.job.verdict)
#   $run $job $nodes         the run directory, the job as squeue takes it, the nodes of a step
# Nodes beyond $nodes are spares. `set -eu` may be on or off.

# Rank 0 notes its step before Python starts. On a busy file system that takes minutes, and until
# then a preemption's SIGTERM would kill a rank: Slurm requeues only jobs that still run when the
# grace time ends.
# shellcheck disable=SC2016,SC2034 # the variables are those of a rank; ranks() uses this one
start='trap "" TERM USR2
[ "$SLURM_PROCID" != 0 ] || echo "$2 ${SLURM_RESTART_COUNT:-0} $SLURM_STEP_ID" >>"$1/epochs"
shift 2
exec "$@"'

code=0 step="" bad="" ended_by_slurm=""
# At Slurm's SIGTERM the ranks save and end; this shell must wait for them, and start no others.
trap 'ended_by_slurm=1' TERM

# The controller may be away for a moment, and sites limit calls: repeat one that fails, for 30 s.
patiently() {
    local pause=1
    until "$@"; do
        ((pause <= 16)) || return 1
        sleep "$pause" || true
        pause=$((2 * pause))
    done
}

# A job that scancel ends is neither.
is_running() {
    local state
    state=$(patiently squeue --noheader --jobs="$job" --format=%T) || return 1
    [[ $state == RUNNING || $state == SIGNALING ]]
}

# Slurm does not tell this shell that the grace time of a preemption has begun, only the ranks. At
# its end it cancels or requeues the job, and other ranks would be lost.
is_preempted() {
    local times=' StartTime=([^ ]*) .* PreemptTime=([0-9]+[^ ]*)'
    [[ $(scontrol --oneliner show job "$job") =~ $times && ${BASH_REMATCH[2]} > ${BASH_REMATCH[1]} ]]
}

# Put the job back into the queue; it shall avoid the nodes $bad.
requeue() {
    local before
    is_running || return 0 # scancel has ended it meanwhile: Slurm would requeue it all the same
    before=$(scontrol show job "$job" | grep -o 'ExcNodeList=[^ (]*') || true
    before=${before#*=}
    scontrol update "JobId=$job" Requeue=1 || true # heals sbatch --no-requeue and JobRequeue=0
    trap '' TERM # the requeue ends this job, and the last command must still run
    echo "job $job is requeued by its batch script" >&2
    patiently scontrol requeue "$job" || return 0
    [[ -z $bad ]] || scontrol update "JobId=$job" "ExcNodeList=${before:+$before,}$bad" || true
}

# A container has no scontrol: rank 0 leaves a note with the hosts that the job shall avoid.
heed_note() {
    [[ -e $run/requeue ]] || return 0
    bad=$(<"$run/requeue")
    requeue
    rm -f "$run/requeue"
}

# Set $where to the option of srun for the next nodes. This fails if too few nodes are good, or if
# the node of this shell is not.
choose_nodes() {
    where=""
    if [[ -z $bad ]] && ((nodes >= SLURM_JOB_NUM_NODES)); then return 0; fi
    local good=() host IFS=$' \n'
    for host in $(scontrol show hostnames "$(squeue --noheader --jobs="$job" --format=%N)"); do
        [[ ,$bad, == *",$host,"* ]] || good+=("$host")
    done
    if ((${#good[@]} < nodes)) || [[ ${good[0]} != "${SLURMD_NODENAME:-}" ]]; then return 1; fi
    IFS=,
    where="--nodelist=${good[*]:0:nodes}"
}

# Set $step to the number of the last step that has begun in this job.
find_step() {
    step=$(grep "^$job ${SLURM_RESTART_COUNT:-0} " "$run/epochs" 2>/dev/null | tail -n 1) || true
    step=${step##* }
}

# Whether the observer of the ranks has named one of this step. An observer of the step $before may
# have outlived it.
ranks_hang() {
    local said
    [[ -e $run/hang.json ]] && said=$(cat "$run/hang.json") || return 1
    find_step
    [[ $step != "$before" && $said == *"\"job_id\": \"$job\","* &&
        $said == *"\"restart_count\": ${SLURM_RESTART_COUNT:-0},"*"\"step_id\": $step,"* ]]
}

cancel_job() { scancel "$job" || true; }

# Wait for the end of the step whose srun has the process id $1; end it if its ranks hang.
watch_step() {
    local pause=0.1 left=60
    while kill -0 "$1" 2>/dev/null; do
        sleep "$pause" || true # Slurm's SIGTERM may end it
        pause=1
        heed_note
        ranks_hang || continue
        if ((left == 60)); then scancel "$SLURM_JOB_ID.$step" || true; fi
        # What still runs then waits for others, or does not heed SIGTERM. KillWait may be minutes.
        if ((left == 55)); then scancel --signal=KILL "$SLURM_JOB_ID.$step" || true; fi
        if ((left-- == 0)); then kill -KILL "$1" || true; fi # srun itself hangs
    done
    code=0
    wait "$1" || code=$?
    heed_note
    find_step
    # No rank has begun. It must not be a step of another run that shares the job.
    [[ $step != "$before" ]] || step=$((${last:--1} + 1 + ${shared:-0}))
}

# A task that cannot be killed, or a lost node, keeps what its step has had. Only then may the next
# step overlap with it: Slurm gives the same GPUs to steps that do so. This fails if other runs have
# steps in this job. $ours: all steps of ranks.
choose_overlap() {
    overlap=""
    ours+=${ours:+,}$SLURM_JOB_ID.$step
    for _ in {1..10}; do
        [[ -n $(squeue --noheader --steps="$ours" 2>/dev/null) ]] || return 0
        sleep 1 || true
    done
    [[ -z ${shared:-} ]] || return 1
    overlap=--overlap
}

# Older versions of Slurm do not set it, and an administrator may change the limit of a job.
find_end() {
    local end
    end=$(squeue --noheader --jobs="$job" --format=%e) || true
    if end=$(date --date="${end:-none}" +%s 2>/dev/null); then SLURM_JOB_END_TIME=$end; fi
}

# The run has ended for good. The script of a chain of jobs defines end_chain, and that of a job with
# --requeue=expedite end_expedited.
ends_for_good() {
    ! declare -F end_chain >/dev/null || end_chain || true
    leaves_run
}

leaves_run() { ! declare -F end_expedited >/dev/null || end_expedited || true; }

# Whether another job trains the run, as a person has submitted it twice. Its ranks would end if ours
# began, for they could be those of a lost node.
another_trains() {
    local other
    other=$(tail -n 1 "$run/epochs" 2>/dev/null) && other=${other%% *} || return 1
    [[ -n $other && $other != "$job" ]] || return 1
    [[ $(squeue --noheader --jobs="$other" --format=%T 2>/dev/null) == @(RUNNING|SIGNALING) ]] ||
        return 1
    echo "job $other trains $run: this one ends" >&2
}

run_steps() {
    local answer ours="" overlap="" where="" last before
    export SLURM_JOB_END_TIME
    find_end
    choose_nodes || true
    while true; do
        if another_trains; then
            code=6 # as of ranks that find the lock of the run taken
            leaves_run
            return 0
        fi
        rm -f "$run/hang.json" "$run/requeue" # of an earlier step
        last=$step
        find_step
        before=$step
        ranks ${overlap:+"$overlap"} ${where:+"$where"} &
        watch_step "$!"
        if ((code == 0)); then ends_for_good; fi
        if ((code == 0)) || ! is_running; then return 0; fi
        find_end
        # A rank that was killed can say nothing.
        answer=$(verdict "$run" "$code" "$step") || true
        case $answer in
            restart*)
                if [[ $answer == *=* ]]; then bad+=${bad:+,}${answer#*=}; fi
                if [[ -n $ended_by_slurm ]] || is_preempted || ! choose_nodes || ! choose_overlap; then
                    requeue
                    return 0
                fi
                echo "step $step has ended with exit code $code: another one begins" >&2
                continue
                ;;
            requeue) requeue ;;
            leave) leaves_run ;;
            cancel)
                ends_for_good
                cancel_job
                ;;
            *) ends_for_good ;;
        esac
        return 0
    done
}
