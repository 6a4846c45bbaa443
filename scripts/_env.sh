# Sourced by the scripts beside it. `ensure_env` leaves an interpreter in $PY that has the project and every pinned
# tool: normally .venv in the repository, made on first use and made again when pyproject.toml or constraints.txt
# change. CKPT_PYTHON=/path/to/python takes an existing interpreter as it is and installs nothing.
set -euo pipefail

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"
cd "$REPO"

say() { printf '%s\n' "$*" >&2; }

# A name on PATH proves nothing (version managers leave shims that only print an error): each candidate is run.
find_python() {
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      if ! "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        say "Python 3.11 was not found; using $("$candidate" --version). The pins are made for 3.11, and for another"
        say "version pip may fetch a larger build of torch."
      fi
      command -v "$candidate"
      return
    fi
  done
  say "No Python 3.10 or newer on PATH (tried python3.11, python3, python3.12, python3.13, python3.10)."
  return 1
}

# Line 1: where the folder was made, as it does not survive a move. Line 2: what was installed. $1 is any interpreter.
stamp() {
  "$1" - "$REPO" <<'PYTHON'
import hashlib, pathlib, sys
files = b"".join(pathlib.Path(sys.argv[1], name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
print(sys.argv[1])
print(hashlib.sha256(files).hexdigest())
PYTHON
}

is_current() {
  [ -f "$VENV/stamp" ] && [ "$(cat "$VENV/stamp")" = "$(stamp "$VENV/bin/python" 2>/dev/null)" ]
}

build_env() {
  if [ "$(head -n 1 "$VENV/stamp" 2>/dev/null)" = "$REPO" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    say "pyproject.toml or constraints.txt changed: updating .venv."
  else
    local base
    base="$(find_python)"
    say "Making .venv with $("$base" --version): one to two minutes and 1.5 GB, once."
    if ! "$base" -m venv --clear "$VENV"; then
      say "The venv module failed; on Debian and Ubuntu it is in the package python3-venv."
      return 1
    fi
  fi
  rm -f "$VENV/stamp"
  # The second name is for newer pips, which no longer apply the first one to build dependencies. Python compiles what
  # it imports; compiling all of torch beforehand would take most of the time.
  PIP_CONSTRAINT="$REPO/constraints.txt" PIP_BUILD_CONSTRAINT="$REPO/constraints.txt" \
    "$VENV/bin/python" -m pip install -qq --no-compile --disable-pip-version-check --no-input \
    --editable '.[test,bench,dev]' >&2 </dev/null
  stamp "$VENV/bin/python" >"$VENV/stamp"
}

ensure_env() {
  if [ -n "${CKPT_PYTHON:-}" ]; then
    PY="$CKPT_PYTHON"
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  PY="$VENV/bin/python"
  if ! is_current; then
    (
      # Two scripts started at once must not install into one folder; the second finds it made and goes on.
      if command -v flock >/dev/null; then flock 9; fi
      if ! is_current; then build_env 9>&-; fi
    ) 9>"$VENV.lock"
  fi
  export PATH="$VENV/bin:$PATH"
}
