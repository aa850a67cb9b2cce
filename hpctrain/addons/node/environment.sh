# shellcheck shell=bash
# Runs Python of an environment that travels as one file:
#   bash environment.sh IMAGE CODE PYTHON ARGUMENT...
# IMAGE is the archive that hpctrain.addons.node.environment has made, CODE the folder of a code
# snapshot or "", with its archive beside IMAGE, and PYTHON the interpreter on the shared file
# system, which takes over where this node has no room. Each node unpacks an archive once, for all
# ranks and jobs of the user; who uses a copy holds a shared lock on it until the process ends.
set -o pipefail
image=$1 code=$2 python=$3
shift 3
here=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/hpctrain-$(id -u)

# Somebody else could have made the folder first, and put code there.
own() { mkdir -m 700 "$here" 2>/dev/null || [[ -d $here && -O $here && ! -L $here ]]; }

# Set $copy to the folder with what the archive $1 holds; keep its shared lock on descriptor $2.
unpack() {
    local name=${1##*/} attempt="${SLURM_JOB_ID:-} ${SLURM_STEP_ID:-}"
    copy=$here/${name%.tar}
    eval "exec $2>>\"\$copy.lock\"" && flock --shared "$2" || return
    touch "$copy.lock"
    [[ -e $copy/unpacked ]] || (
        # One rank unpacks it while the others wait. Of a full disk only the first one tells.
        flock 7 || exit
        [[ ! -e $copy/unpacked ]] || exit 0
        if [[ -e $copy.failed && $(<"$copy.failed") == "$attempt" ]]; then exit 1; fi
        remove_old
        rm -rf "$copy"
        mkdir "$copy" && fetch "$1" && set_home && : >"$copy/unpacked" && exit
        rm -rf "$copy"
        echo "$attempt" >"$copy.failed"
        exit 1
    ) 7>>"$copy.lock.unpacking"
}

# Unpack the part of the archive $1 that begins at byte $2 and ends before byte $3.
part() {
    dd if="$1" bs=1M iflag=skip_bytes,count_bytes skip="$2" count="$(($3 - $2))" status=none |
        tar -xPC "$copy"
}

# Unpack the folders, then each part by a process of its own: they wait for a slow file system, and
# for the disk, at the same time. Two that made the same folder would fail.
fetch() {
    local begins number process processes=() code=0
    read -ra begins < <(dd if="$1" bs=512 skip=1 count=1 status=none)
    ((${#begins[@]} > 1)) && part "$1" "${begins[@]:0:2}" || return
    for ((number = 2; number < ${#begins[@]}; number++)); do
        part "$1" "${begins[@]:number-1:2}" &
        processes+=("$!")
    done
    for process in "${processes[@]}"; do wait "$process" || code=1; done # none may write any more
    return "$code"
}

# A virtual environment names the folder of its Python. Code may have a folder `base` of its own.
set_home() {
    [[ ! -e $copy/base || ! -e $copy/environment/pyvenv.cfg ]] ||
        sed -i "s|^home = .*|home = $copy/base/bin|" "$copy/environment/pyvenv.cfg"
}

# Remove copies that no process uses and that were not used for three days. `unpacked` goes first:
# who is killed while the files go must not leave a copy that passes for whole.
remove_old() {
    local old
    for old in "$here"/*.lock; do
        [[ -z $(find "$old" -mtime +3) ]] || (
            flock --nonblock 6 && rm -f "${old%.lock}/unpacked" &&
                rm -rf "${old%.lock}" "${old%.lock}.failed" "$old"*
        ) 6>>"$old"
    done
}

if own && unpack "$image" 8; then
    new=$copy/environment/bin/${python##*/}
    if [[ ! -x $new ]]; then
        echo "launch.environment=image: there is no program $new" >&2
    elif [[ -z $code ]]; then
        exec "$new" "$@"
    elif unpack "${image%/*}/code-${code##*/}.tar" 9; then
        PYTHONPATH=${PYTHONPATH//"$code"/"$copy"} exec "$new" "$@"
    fi
fi
echo "launch.environment=image: $here cannot have a copy (see above); this process starts from the" \
    "shared file system, which is slower" >&2
exec "$python" "$@"
