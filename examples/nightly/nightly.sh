#!/usr/bin/env bash
# A nightly job: appends new records to a dataset, verifies it, and removes old files.
#
#     nightly.sh DATASET SOURCE
#
# SOURCE has the records of one night: a pattern or a folder. A night without records is
# no failure. After a failure, ALERT runs, a shell command that reads the end of the log
# on standard input, and the exit code is that of the step that failed. The same command
# may be run again after a failure or a kill.
#
# Flags of every step, such as those of the store, come from PACKSTORE_OPTIONS.
set -euo pipefail
dataset=$1
source=$2
read -ra options <<<"${PACKSTORE_OPTIONS:-}"

log=$(mktemp)
finish() {
  local code=$?
  cat "$log" >&2
  if ((code != 0)); then
    {
      echo "nightly job of $dataset failed ($code)"
      tail -n 20 "$log"
    } | bash -c "${ALERT:-cat >&2}" || true
  fi
  rm -f "$log"
}
trap finish EXIT

# The URLs of a dataset, or of both splits of one that has a validation split.
urls() {
  python -c '
import json, sys
result = json.load(sys.stdin)
datasets = result["splits"].values() if "splits" in result else [result]
print(*(dataset["url"] for dataset in datasets), sep="\n")
'
}

appended=$(packstore append "$dataset" "$source" --allow-empty --json "${options[@]}" 2>>"$log")
echo "$appended"
urls <<<"$appended" | while read -r url; do
  # Not only after new records: the night before may have ended between these steps.
  packstore verify "$url" "${options[@]}" >>"$log" 2>&1
  packstore clean "$url" --keep-versions 7 --delete "${options[@]}" >>"$log" 2>&1
done
