#!/bin/sh
# Removes what install.sh installed: sh uninstall.sh [--keep-data | --delete-data]
# Without an option it asks about keys, settings and checkpoints; where nobody can answer they stay.
set -eu

root=$HOME/.local/lib/neuroshard
bin=$HOME/.local/bin
share=${XDG_DATA_HOME:-$HOME/.local/share}
data=$share/neuroshard
if [ "$(uname -s)" = Darwin ]; then data="$HOME/Library/Application Support/neuroshard"; fi
if [ -d "$HOME/.neuroshard" ]; then data=$HOME/.neuroshard; fi
answer=ask

for argument in "$@"; do
    case "$argument" in
        --keep-data) answer=keep ;;
        --delete-data) answer=delete ;;
        -h | --help) sed -n 2,3p "$0"; exit 0 ;;
        *) echo "uninstall.sh: unknown option $argument (see --help)" >&2; exit 2 ;;
    esac
done

if [ -x "$root/neuroshard" ]; then
    # 4: no node runs
    for demo in "" --demo; do
        code=0
        # shellcheck disable=SC2086 # an empty word must vanish
        "$root/neuroshard" stop $demo >/dev/null 2>&1 || code=$?
        if [ "$code" != 0 ] && [ "$code" != 4 ]; then
            echo "uninstall.sh: the running node could not be stopped; end it and try again" >&2
            exit "$code"
        fi
    done
    "$root/neuroshard" autostart off >/dev/null 2>&1 || true
fi
if [ "$(readlink "$bin/neuroshard" 2>/dev/null || true)" = "$root/neuroshard" ]; then rm -f "$bin/neuroshard"; fi
rm -f "$share/applications/neuroshard.desktop" "$share/icons/hicolor/scalable/apps/neuroshard.svg"
rm -rf "$root"
echo "NeuroShard is removed."

[ -d "$data" ] || exit 0
if [ "$answer" = ask ]; then
    answer=keep
    if [ -t 0 ]; then
        printf 'Delete keys, settings and checkpoints in %s as well? They cannot be brought back. [y/N] ' "$data"
        read -r reply
        case "$reply" in y | Y | yes) answer=delete ;; esac
    fi
fi
if [ "$answer" = delete ]; then
    rm -rf "$data"
    echo "$data is deleted."
else
    echo "Keys, settings and checkpoints stay in $data."
fi
