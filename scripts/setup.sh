#!/bin/sh
# Makes .venv with Skerry in it. `setup.sh dev` adds what the tests need, Debian packages included where we are root.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
kind=${1:-user}

apt_install() {
    missing=""
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null 2>&1 || missing="$missing ${pair##*=}"
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "Installing Debian packages:$missing"
        apt-get update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    else
        echo "Missing:$missing. Install them as root: apt-get install$missing" >&2
        return 1
    fi
}

# One program out of a Debian package whose service nobody here wants to have installed and started.
apt_extract() {
    [ ! -x "$venv/bin/$1" ] || return 0
    echo "Taking $1 out of the Debian package $2"
    place=$(mktemp -d)
    chmod 755 "$place"
    (
        cd "$place"
        apt-get download -qq -o APT::Sandbox::User=root "$2"
        dpkg-deb --fsys-tarfile "$2"_*.deb | tar -xO "./usr/bin/$1" >"$1"
    )
    install -m 755 "$place/$1" "$venv/bin/$1"
    rm -rf "$place"
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Skerry needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=/path/to/python3." >&2
    exit 1
fi
if [ ! -x "$venv/bin/pip" ]; then
    if ! "$python" -m venv "$venv" 2>/dev/null; then
        rm -rf "$venv"
        apt_install no-such-command=python3-venv
        "$python" -m venv "$venv"
    fi
fi

# Installing anew costs seconds; the stamp says for which pyproject.toml it was done.
extra=""
[ "$kind" = dev ] && extra="[dev]"
stamp="$venv/.skerry$extra"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "Installing Skerry$extra into $venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --editable ".$extra" 2>&1 | grep -v '^WARNING' || true
    "$venv/bin/python" -c 'import skerry'
    touch "$stamp"
fi

# Once, rather than with every start where Python may not write what it compiled (PYTHONDONTWRITEBYTECODE).
"$venv/bin/python" -m compileall -q src

# As root, sandboxes' files are on btrfs, which makes snapshots instant; without it they are copies.
if [ "$(id -u)" = 0 ] && [ "$kind" = user ]; then
    (PATH="$PATH:/usr/sbin:/sbin" && apt_install mkfs.btrfs=btrfs-progs) || true
fi
if [ "$kind" = dev ]; then
    PATH="$PATH:/usr/sbin:/sbin"
    apt_install pgrep=procps ip=iproute2 iptables=iptables curl=curl git=git mmdebstrap=mmdebstrap newuidmap=uidmap \
        tmux=tmux setpriv=util-linux zstd=zstd \
        mkfs.btrfs=btrfs-progs mkfs.ext4=e2fsprogs ss=iproute2 top=procps script=bsdutils chromium=chromium wrk=wrk \
        vim=vim less=less rclone=rclone g++=g++ gdb=gdb strace=strace mksquashfs=squashfs-tools openssl=openssl \
        dockerd=docker.io
    apt_extract promtool prometheus
    # The agents that tests drive, once for this machine; which versions, is in toolboxes.py.
    stamp="$venv/.skerry-toolboxes"
    if [ ! -e "$stamp" ] || [ src/skerry/providers/toolboxes.py -nt "$stamp" ]; then
        for toolbox in opencode opencode-plugin claude-code; do
            "$venv/bin/skerry" toolbox install "$toolbox" >/dev/null
        done
        touch "$stamp"
    fi
fi
