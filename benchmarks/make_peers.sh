#!/usr/bin/env bash
# Makes .venv-peers/{openmpi,mpich,intelmpi}: one environment each, for all three bring bin/mpiexec and lib/libmpi.so.
# Nothing is compiled. An environment that is there and of the required versions is left alone.
#   benchmarks/make_peers.sh [NAME ...]      PYTHON=python3.12 to choose the interpreter
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 I_MPI_FABRICS=shm

make_peer() {
    local name=$1 prefix=$root/.venv-peers/$1 requirements=$root/benchmarks/peers/requirements-$1.txt
    if [[ -f $prefix/ok ]] && cmp -s "$requirements" "$prefix/ok"; then
        echo "$name: already there"
        return
    fi
    [[ -f $requirements ]] || { echo "$name: no $requirements" >&2; return 1; }
    echo "$name: installing"
    rm -rf "$prefix"
    "$python" -m venv "$prefix"
    # The requirements are complete, and Intel MPI's wheel asks for a libfabric that is not on PyPI.
    "$prefix/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$requirements"
    # `ok` is what benchmarks/peers/mpi.py looks for: two ranks have added 1 and 1.
    "$prefix/bin/mpiexec" -n 2 "$prefix/bin/python" -c \
        'from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2; print(end=MPI.Get_library_version()[:22] + "\n" if MPI.COMM_WORLD.rank == 0 else "")'
    cp "$requirements" "$prefix/ok"
    echo "$name: works"
}

(($#)) || set -- openmpi mpich intelmpi
failed=()
for name in "$@"; do
    # In a shell of its own, that one which cannot be had here does not keep the others away. (`make_peer || ...`
    # would switch `set -e` off inside it.)
    set +e
    (set -e; make_peer "$name")
    (($? == 0)) || failed+=("$name")
    set -e
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
