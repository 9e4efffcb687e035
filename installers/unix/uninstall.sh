#!/bin/sh
# Removes what install.sh installed: sh uninstall.sh [--keep-data | --delete-data]
# Without an option it asks whether to delete keys, settings and checkpoints. Without a terminal it keeps them.
set -eu

root=$HOME/.local/lib/neuroshard
bin=$HOME/.local/bin
share=${XDG_DATA_HOME:-$HOME/.local/share}
config=${XDG_CONFIG_HOME:-$HOME/.config}
data=$share/neuroshard
if [ "$(uname -s)" = Darwin ]; then data="$HOME/Library/Application Support/neuroshard"; fi
if [ -d "$HOME/.neuroshard" ]; then data=$HOME/.neuroshard; fi
answer=ask

for argument in "$@"; do
    case "$argument" in
        --keep-data) answer=keep ;;
        --delete-data) answer=delete ;;
        -h | --help) sed -n 2,3p "$0"; exit 0 ;;
        *) echo "uninstall.sh: unknown option $argument. --help lists the options." >&2; exit 2 ;;
    esac
done

# If the program does not start, no node runs, and this script finds the folders itself.
folders=
if "$root/neuroshard" --version >/dev/null 2>&1; then
    # 4: no node runs
    for demo in "" --demo; do
        code=0
        # shellcheck disable=SC2086 # an empty option must not become an argument
        output=$("$root/neuroshard" stop $demo 2>&1) || code=$?
        if [ "$code" != 0 ] && [ "$code" != 4 ]; then
            echo "uninstall.sh: A running node could not be stopped. Stop it, then try again." >&2
            echo "$output" >&2
            exit "$code"
        fi
    done
    "$root/neuroshard" autostart off >/dev/null 2>&1 || true
    folders=$("$root/neuroshard" folders 2>/dev/null || true)
else
    units=$config/systemd/user
    for entry in "$units/default.target.wants/neuroshard.service" "$units/neuroshard.service" \
        "$config/autostart/neuroshard.desktop" "$HOME/Library/LaunchAgents/ai.neuroshard.node.plist"; do
        if grep -qsF "$root/neuroshard" "$entry"; then rm -f "$entry"; fi
    done
fi
if [ -z "$folders" ]; then
    folders=$data
    named=$(grep -s '^[[:space:]]*data_dir[[:space:]]*=' "$data/config.toml" || true)
    if [ -n "$named" ]; then echo "Another data folder, named in $data/config.toml, is not removed: $named"; fi
fi
if [ "$(readlink "$bin/neuroshard" 2>/dev/null || true)" = "$root/neuroshard" ]; then rm -f "$bin/neuroshard"; fi
app=$HOME/Applications/NeuroShard.app
if grep -qsF ai.neuroshard.app "$app/Contents/Info.plist"; then rm -rf "$app"; fi
rm -f "$share/applications/neuroshard-link.desktop" "$share/mime/packages/neuroshard.xml"
rm -f "$share/applications/neuroshard.desktop" "$share/icons/hicolor/scalable/apps/neuroshard.svg"
# The indexes of file types and programs: rebuilt, or removed if they have no other entries.
if rmdir "$share/mime/packages" 2>/dev/null; then
    for index in XMLnamespaces aliases generic-icons globs globs2 icons magic mime.cache subclasses treemagic types \
        version application/x-neuroshard-invitation.xml; do
        rm -f "$share/mime/$index"
    done
elif [ -d "$share/mime/packages" ]; then
    update-mime-database "$share/mime" 2>/dev/null || true
fi
if [ -f "$share/applications/mimeinfo.cache" ]; then
    if ls "$share/applications/"*.desktop >/dev/null 2>&1; then
        update-desktop-database "$share/applications" 2>/dev/null || true
    else
        rm -f "$share/applications/mimeinfo.cache"
    fi
fi
rm -rf "$root"
echo "NeuroShard is removed."

# The default folder, and the folder that was chosen in the wizard.
there=$(echo "$folders" | while IFS= read -r folder; do
    case "$HOME/" in
        "${folder%/}"/*) echo "$folder is not removed, because it contains your home folder." >&2 ;;
        *) if [ -d "$folder" ]; then echo "$folder"; else echo "$folder was not found. Is its disk connected?" >&2; fi ;;
    esac
done)
[ -n "$there" ] || exit 0
if [ "$answer" = ask ]; then
    answer=keep
    if [ -t 0 ]; then
        printf 'Delete the keys, settings and checkpoints too? They cannot be restored. They are in\n%s\n[y/N] ' "$there"
        read -r reply
        case "$reply" in y | Y | yes) answer=delete ;; esac
    fi
fi
echo "$there" | while IFS= read -r folder; do
    if [ "$answer" = delete ]; then
        rm -rf "$folder"
        echo "$folder is deleted."
    else
        echo "Keys, settings and checkpoints stay in $folder."
    fi
done
