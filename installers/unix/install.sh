#!/bin/sh
# Installs NeuroShard for this user, without administrator rights: sh install.sh [--autostart] [--no-desktop-entry]
# The program is in ~/.local/lib/neuroshard, the command is ~/.local/bin/neuroshard. `update rollback` restores the
# version before.
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
        -h | --help) sed -n 2,4p "$0"; exit 0 ;;
        *) echo "install.sh: unknown option $argument. --help lists the options." >&2; exit 2 ;;
    esac
done

if [ "$(id -u)" = 0 ] && [ -n "${SUDO_USER:-}" ]; then
    echo "install.sh: NeuroShard installs for one user. Run this script as that user, without sudo." >&2
    exit 2
fi
version=$(cat "$here/VERSION")
case "$version" in
    '' | *[!0-9.]*) echo "install.sh: $here/VERSION contains no version. Unpack the archive again." >&2; exit 5 ;;
esac

mkdir -p "$root/versions" "$bin"
place() { # FILE MODE: write standard input to FILE by a rename, so that a kill leaves the old content or the new
    cat >"$1.new"
    chmod "$2" "$1.new"
    mv -f "$1.new" "$1"
}

stop_nodes() { # a running node needs its files until it has saved a final checkpoint
    if [ -x "$root/neuroshard" ]; then
        "$root/neuroshard" stop >/dev/null 2>&1 || true
        "$root/neuroshard" stop --demo >/dev/null 2>&1 || true
    fi
}

if [ -d "$here/program" ]; then
    # The copy is made next to the folder in use and replaces it only when it is complete and starts.
    folder=$root/versions/$version
    rm -rf "$folder.new"
    cp -R "$here/program" "$folder.new"
    "$folder.new/neuroshard" --version || {
        rm -rf "$folder.new"
        echo "install.sh: The new program does not start. The installed version is unchanged." >&2
        exit 5
    }
    sync # after a power cut, .complete must not be next to empty files
    : >"$folder.new/.complete"
    stop_nodes
    rm -rf "$folder.old"
    if [ -d "$folder" ]; then mv "$folder" "$folder.old"; fi
    mv "$folder.new" "$folder" || { mv "$folder.old" "$folder"; exit 5; }
    old=$(cat "$root/current" 2>/dev/null || true)
    if [ -n "$old" ] && [ "$old" != "$version" ]; then echo "$old" | place "$root/previous" 644; fi
    place "$root/neuroshard" 755 <"$here/neuroshard"
    echo "$version" | place "$root/current" 644
    rm -rf "$folder.old"
else
    # Python and the packages come from the package index. The payload has the digest of each package.
    UV_PYTHON_INSTALL_DIR=$root/python UV_CACHE_DIR=$root/cache UV_PYTHON_INSTALL_BIN=0
    export UV_PYTHON_INSTALL_DIR UV_CACHE_DIR UV_PYTHON_INSTALL_BIN
    "$here/payload/uv" python install --no-config 3.12
    stop_nodes
    "$here/payload/uv" run --no-project --no-config --managed-python --python 3.12 \
        "$here/payload/bootstrap.py" --root "$root"
    rm -rf "$root/cache"
fi
place "$root/uninstall.sh" 755 <"$here/uninstall.sh"
ln -sf "$root/neuroshard" "$bin/neuroshard"

if [ "$desktop" = yes ] && [ "$(uname -s)" = Linux ]; then
    mkdir -p "$share/applications" "$share/icons/hicolor/scalable/apps"
    cp "$here/neuroshard.svg" "$share/icons/hicolor/scalable/apps/neuroshard.svg"
    sed "s|^Exec=.*|Exec=\"$bin/neuroshard\"|" "$here/neuroshard.desktop" | place "$share/applications/neuroshard.desktop" 644
    # A click on a neuroshard:// link or an invitation file opens a page. It joins nothing.
    mkdir -p "$share/mime/packages"
    cp "$here/neuroshard.xml" "$share/mime/packages/neuroshard.xml"
    sed "s|^Exec=neuroshard|Exec=\"$bin/neuroshard\"|" "$here/neuroshard-link.desktop" |
        place "$share/applications/neuroshard-link.desktop" 644
    update-desktop-database "$share/applications" 2>/dev/null || true
    update-mime-database "$share/mime" 2>/dev/null || true
fi
make_app() { # APP: an app for a double click, for neuroshard:// links and for invitation files
    if [ -e "$1" ] && ! grep -qsF ai.neuroshard.app "$1/Contents/Info.plist"; then return 1; fi # another program's
    rm -rf "$1" &&
        osacompile -o "$1" "$here/neuroshard.applescript" &&
        plutil -replace CFBundleIdentifier -string ai.neuroshard.app "$1/Contents/Info.plist" &&
        plutil -replace LSUIElement -bool YES "$1/Contents/Info.plist" &&
        plutil -replace CFBundleURLTypes -json "$(cat "$here/url-types.json")" "$1/Contents/Info.plist" &&
        plutil -replace CFBundleDocumentTypes -json "$(cat "$here/document-types.json")" "$1/Contents/Info.plist" &&
        codesign --force --sign - "$1" # the seal of the bundle must cover its new description
}

if [ "$desktop" = yes ] && [ "$(uname -s)" = Darwin ]; then
    mkdir -p "$HOME/Applications"
    # Finder registers the handler when it sees the app. A failure must not stop the installation.
    make_app "$HOME/Applications/NeuroShard.app" ||
        echo "install.sh: The app for links could not be made. Paste invitations into the page instead." >&2
fi
if [ "$autostart" = yes ]; then "$root/neuroshard" autostart on; fi

echo "NeuroShard $version is installed: $bin/neuroshard"
case ":$PATH:" in
    *":$bin:"*) ;;
    *) echo "Your PATH does not contain $bin. Add it, or start the program with its full path." ;;
esac
echo "To try it: neuroshard demo    To remove it: sh $root/uninstall.sh"
