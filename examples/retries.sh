#!/usr/bin/env bash
# A step of a workflow: packs, verifies, and prints the version. Run again after a failure, it takes
# over what is finished; run again after success, it changes nothing.
#
#     examples/retries.sh job.yaml [FLAG …]
#
# Exit codes are those of packstore: 0 done, 1 a named error, 2 wrong usage. Options of the store may
# come from the environment (PACKSTORE_OPTIONS), so that the file holds no secrets.
set -euo pipefail
job=$1
shift
read -ra options <<<"${PACKSTORE_OPTIONS:-}"

packed=$(packstore pack --config "$job" "$@" "${options[@]}" --log-format json --json)
field() { python -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1" <<<"$packed"; }

packstore verify "$(field url)" "${options[@]}" --log-format json --json >&2
field version
