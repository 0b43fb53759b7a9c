#!/usr/bin/env bash
# Runs the tests as a fresh machine would: a clean virtual environment, a clone of what is
# committed, a home of its own, and each of the settings that differ between machines.
#
#     tests/fresh.sh                         every configuration, the whole suite
#     tests/fresh.sh --quick                 every configuration, the tests that they can touch
#     tests/fresh.sh narrow ascii            these configurations
#     tests/fresh.sh long -- tests/cli -x    what follows -- goes to pytest, in place of the suite
#
# Options:
#     --python PATH   makes the environment (default: python3; Python 3.11 or newer)
#     --data FOLDER   real data, for the tests that skip without it (default: ../shared/data)
#     --workers N     pytest workers (default: one per core, 4 at most)
#     --keep          leaves the working folder
#     --list          names the configurations
set -euo pipefail

declare -A ABOUT=(
  [default]="nothing set"
  [short]="a temporary folder of 20 characters"
  [long]="a temporary folder of 150 characters"
  [narrow]="COLUMNS=40"
  [ascii]="LC_ALL=C PYTHONUTF8=0"
  [zone]="TZ=Asia/Kathmandu"
  [user]="a user who is not root"
)
ALL=(default short long narrow ascii zone user)
QUICK=(tests/cli tests/io tests/tokenizer tests/stores tests/exchange tests/schemas tests/etl tests/config tests/test_*.py
  tests/torch/training/test_train_settings.py -m "not slow")

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=python3 data=$here/../shared/data workers= keep= chosen=() tests=()
while (($#)); do
  case $1 in
    --quick) tests=("${QUICK[@]}") ;;
    --python) python=$2 && shift ;;
    --data) data=$2 && shift ;;
    --workers) workers=$2 && shift ;;
    --keep) keep=1 ;;
    --list) for name in "${ALL[@]}"; do echo "$name: ${ABOUT[$name]}"; done && exit ;;
    --) shift && tests=("$@") && break ;;
    *) [[ -v ABOUT[$1] ]] && chosen+=("$1") || { echo "fresh.sh: no configuration $1; --list names them" >&2 && exit 2; } ;;
  esac
  shift
done
((${#chosen[@]})) || chosen=("${ALL[@]}")
[[ $workers ]] && spread=(-n "$workers") || spread=(-n auto --maxprocesses 4)

# What the caller has set must not matter.
unset COLUMNS TZ LC_ALL LC_CTYPE PYTHONUTF8 PYTHONIOENCODING PYTHONPATH PYTEST_ADDOPTS TMPDIR
export LANG=C.UTF-8
umask 022

work=$(mktemp -d /tmp/fresh.XXXXXX)
folders=("$work")
clean() { [[ $keep ]] && echo "kept: ${folders[*]}" || rm -rf "${folders[@]}"; }
trap clean EXIT
chmod 755 "$work"
clone=$work/packstore
git clone --quiet "$here" "$clone"
[[ -d $data ]] && mkdir "$work/shared" && ln -s "$(cd "$data" && pwd)" "$work/shared/data"

began=$SECONDS
make --quiet -C "$clone" PYTHON="$python" .venv/installed
"$clone/.venv/bin/python" "$clone/tests/support/node_packages.py"
echo "fresh: environment and clone of $(git -C "$clone" rev-parse --short HEAD): $((SECONDS - began)) s"

# temporary CHARACTERS: makes a temporary folder whose path is so long, and names it in $folder.
temporary() {
  folder=$(printf '/tmp/fresh%010d' $$)
  while ((${#folder} < $1)); do folder+=_; done
  mkdir -m 777 "$folder"
  folders+=("$folder")
}

# suite VARIABLE=VALUE …: the tests, with a home that nothing has been put into.
suite() {
  local home=$work/home-$name
  mkdir -m 777 "$home"
  (cd "$clone" && "${as[@]}" env HOME="$home" "$@" .venv/bin/python -m pytest "${spread[@]}" \
    -q "${tests[@]}")
}

failed=() lines=()
for name in "${chosen[@]}"; do
  began=$SECONDS set=() as=()
  case $name in
    short) temporary 20 && set=(TMPDIR="$folder") ;;
    long) temporary 150 && set=(TMPDIR="$folder") ;;
    narrow) set=(COLUMNS=40) ;;
    ascii) set=(LC_ALL=C PYTHONUTF8=0) ;;
    zone) set=(TZ=Asia/Kathmandu) ;;
    user)
      if ((EUID == 0)); then
        as=(setpriv --reuid=65534 --regid=65534 --clear-groups)
        chown -R 65534:65534 "$clone"
        if ! (cd / && "${as[@]}" "$clone/.venv/bin/python" -c pass); then
          echo "fresh.sh: only root may run $python; give another with --python" >&2
          failed+=("$name") && lines+=("$name: not run") && continue
        fi
        temporary 24 && set=(TMPDIR="$folder")
      fi
      ;;
  esac
  echo "fresh: $name (${ABOUT[$name]})"
  if suite "${set[@]}" 2>&1 | tee "$work/$name.log"; then status=passed; else
    status=FAILED && failed+=("$name")
  fi
  lines+=("$name (${ABOUT[$name]}): $status in $((SECONDS - began)) s: $(tail -n 1 "$work/$name.log")")
  rm -rf "${folders[@]:1}" && folders=("$work")
done

echo
printf '%s\n' "${lines[@]}"
((${#failed[@]} == 0)) || { echo "fresh: failed: ${failed[*]}" && exit 1; }
