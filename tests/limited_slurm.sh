#!/bin/bash
# A stand-in for each of Slurm's commands at a site that takes so many calls a minute. $here has the
# clock in seconds, the limit, and what was taken and refused. `empty` there: no job is left.
here=$(dirname "$(dirname "$0")")
name=${0##*/}
now=$(<"$here/clock")
taken=$(awk -v now="$now" '$1 > now - 60' "$here/taken" | wc -l)
if ((taken >= $(<"$here/limit"))); then
    echo "$now $name" >>"$here/refused"
    echo "$name: error: Submission rate limit exceeded: 4 calls per minute" >&2
    exit 1
fi
echo "$now $name $*" >>"$here/taken"
case "$name $1" in
    "sbatch --test-only") echo "sbatch: Job 1 to start" >&2 ;;
    sbatch*) echo 7 ;;
    scontrol*) echo MaxArraySize = 1001 ;;
    squeue*) # the runs of all arrays
        for script in "$here"/runs/sweeps/*/array-*/job.sh; do
            [[ -e $script && ! -e $here/empty ]] || continue
            n=0
            while read -r _; do
                echo "$n|7_$n|PENDING|Priority||N/A||$script"
                n=$((n + 1))
            done <"${script%/*}/tasks"
        done
        ;;
esac
exit 0
