# shellcheck shell=bash disable=SC2154 # the script sets $script and $job, and steps.sh the others
# Several runs share this job. Each has a shell and steps of its own, and never one with --overlap:
#   run_pack RUN...          starts the runs, and returns when all have ended
#   verdict RUN SCRIPT       answers "left CODE" if a run does not go on in this job
# Only the job as a whole can be requeued. That waits until no run trains any more.

# The shell of one run. What concerns the job is left to `run_pack`, for which it leaves a file.
# shellcheck disable=SC2034,SC2317 # steps.sh uses them
run_one() {
    trap 'ended_by_slurm=1' TERM # a new shell has no traps
    run=$1 shared=100000 # beyond the number of any step
    [[ -d $run/logs ]] || mkdir "$run/logs"
    exec >>"$run/logs/$job.batch.log" 2>&1 || exit 1
    export HPCTRAIN_REQUEUE_NOTE=$run/requeue
    requeue() { echo "$bad" >"$run/requeue-job"; }
    cancel_job() { :; }
    ends_for_good() { :; }
    leaves_run() { :; }
    answer=$(verdict "$run" "$script") || true
    if [[ $answer == left* ]]; then
        echo "$run has ended for good, was cancelled, or has another job: it does not begin here" >&2
        exit "${answer#left }"
    fi
    run_steps
}

# Whether one of the runs has neither ended nor saved and asked for the requeue. $pids: their shells.
some_train() {
    local i
    for i in "${!pids[@]}"; do
        if kill -0 "${pids[i]}" 2>/dev/null && [[ ! -e ${all[i]}/requeue-job ]]; then return 0; fi
    done
    return 1
}

# Whether Slurm cancels this job in some seconds, as it is preempted. Slurm tells only the ranks, so
# it is asked when a run has just wanted the requeue, which then waits no longer for the slowest.
is_late() {
    local wants grace=${HPCTRAIN_GRACE_S:-}
    [[ -n $grace ]] || return 1
    wants=$(find "${all[@]/%//requeue-job}" -newermt "-$grace seconds" 2>/dev/null) || true
    [[ -n $wants ]] && is_preempted || return 1
    (($(date +%s) - $(date --date="${BASH_REMATCH[2]}" +%s) >= grace - 4))
}

run_pack() {
    local all=("$@") pids=() each said asked=""
    for each in "${all[@]}"; do
        rm -f "$each/requeue-job"
        (
            run_one "$each"
            exit "$code"
        ) &
        pids+=("$!")
    done
    while some_train && ! is_late; do sleep 1 || true; done # Slurm's SIGTERM may end it
    for each in "${all[@]}"; do
        said=$(cat "$each/requeue-job" 2>/dev/null) || continue
        asked=1 bad+=${said:+${bad:+,}$said}
    done
    [[ -z $asked ]] || requeue
    for each in "${pids[@]}"; do
        while kill -0 "$each" 2>/dev/null; do sleep 1 || true; done
        said=0
        wait "$each" || said=$?
        ((said <= code)) || code=$said
    done
    [[ -n $asked ]] || ends_for_good
}
