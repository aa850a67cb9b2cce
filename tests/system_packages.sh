#!/usr/bin/env bash
# Root installs the missing system packages that the tests need, with apt. Without them the cluster
# tests are skipped, and tests/run.sh says so loudly.
set -euo pipefail

packages=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 shellcheck hdf5-tools)

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get dpkg-query >/dev/null; then exit 0; fi
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null |
        grep --quiet 'install ok installed' || missing+=("$package")
done
((${#missing[@]})) || exit 0
echo "installing ${missing[*]}"
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "${missing[@]}" >/dev/null; }; then
    printf '\n*** the system packages could not be installed\n\n' >&2
fi
