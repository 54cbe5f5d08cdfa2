#!/usr/bin/env bash
# install_slurm.sh PYTHON: install Slurm and munge from Debian, and run their tests with a Python that has 'syncvar[test]'. Needs root.
# The tests start clusters of their own, of nodes on this machine or in network namespaces; nothing of it stays, and no service of the system is touched.
set -euo pipefail
python=${1:?a Python in which syncvar[test] is installed}
cd "$(dirname "$0")/../.."
command -v slurmctld >/dev/null && command -v munged >/dev/null && test -x /usr/sbin/sshd || {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 openssh-client openssh-server
}
exec "$python" -m pytest -m slurm tests/interop/test_slurm.py tests/interop/test_slurm_elastic.py "${@:2}"
