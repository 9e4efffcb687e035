#!/bin/sh
# Installs NeuroShard for this user, without administrator rights: sh install.sh [--autostart] [--no-desktop-entry]
# Into ~/.local/lib/neuroshard, with ~/.local/bin/neuroshard. What is there of an earlier version stays for `rollback`.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$HOME/.local/lib/neuroshard
bin=$HOME/.local/bin
share=${XDG_DATA_HOME:-$HOME/.local/share}
autostart=no
desktop=yes

for argument in "$@"; do
    case "$argument" in
        --autostart) autostart=yes ;;
        --no-desktop-entry) desktop=no ;;
        -h | --help) sed -n 2,3p "$0"; exit 0 ;;
        *) echo "install.sh: unknown option $argument (see --help)" >&2; exit 2 ;;
    esac
done

if [ "$(id -u)" = 0 ] && [ -n "${SUDO_USER:-}" ]; then
    echo "install.sh: run it as yourself, without sudo: it installs for one user" >&2
    exit 2
fi
version=$(cat "$here/VERSION")
case "$version" in
    '' | *[!0-9.]*) echo "install.sh: $here/VERSION names no version: unpack the archive again" >&2; exit 5 ;;
esac

# A node that runs from here keeps its files until it has ended with a checkpoint.
if [ -x "$root/neuroshard" ]; then
    "$root/neuroshard" stop >/dev/null 2>&1 || true
    "$root/neuroshard" stop --demo >/dev/null 2>&1 || true
fi

folder=$root/versions/$version
mkdir -p "$root/versions" "$bin"
rm -rf "$folder"
if [ -d "$here/program" ]; then
    cp -R "$here/program" "$folder"
else
    sh "$here/make_environment.sh" "$folder"
fi
program=$folder/neuroshard
[ -x "$program" ] || program=$folder/bin/neuroshard
"$program" --version
: >"$folder/.complete"

# The pointer last, each file by a rename: a kill leaves the old version or the new one.
place() { # FILE MODE: standard input becomes FILE
    cat >"$1.new"
    chmod "$2" "$1.new"
    mv -f "$1.new" "$1"
}
old=$(cat "$root/current" 2>/dev/null || true)
if [ -n "$old" ] && [ "$old" != "$version" ]; then echo "$old" | place "$root/previous" 644; fi
place "$root/neuroshard" 755 <"$here/neuroshard"
place "$root/uninstall.sh" 755 <"$here/uninstall.sh"
echo "$version" | place "$root/current" 644
ln -sf "$root/neuroshard" "$bin/neuroshard"

if [ "$desktop" = yes ] && [ "$(uname -s)" = Linux ]; then
    mkdir -p "$share/applications" "$share/icons/hicolor/scalable/apps"
    cp "$here/neuroshard.svg" "$share/icons/hicolor/scalable/apps/neuroshard.svg"
    sed "s|^Exec=.*|Exec=\"$bin/neuroshard\"|" "$here/neuroshard.desktop" | place "$share/applications/neuroshard.desktop" 644
fi
if [ "$autostart" = yes ]; then "$root/neuroshard" autostart on; fi

echo "NeuroShard $version is installed: $bin/neuroshard"
case ":$PATH:" in
    *":$bin:"*) ;;
    *) echo "Your PATH lacks $bin: add it, or call the program by that name." ;;
esac
echo "Try: neuroshard demo    Remove it with: sh $root/uninstall.sh"
