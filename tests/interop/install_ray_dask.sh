#!/usr/bin/env bash
# install_ray_dask.sh FOLDER: make a virtual environment there with Ray and Dask, and run their tests in it.
set -euo pipefail
folder=${1:?a folder for the virtual environment}
cd "$(dirname "$0")/../.."
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet -e '.[test,ray,dask]'
exec "$folder/bin/python" -m pytest -m 'ray or dask' tests/interop/test_ray_dask.py "${@:2}"
