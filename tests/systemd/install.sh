#!/bin/bash
# The daemon and its unit in a root directory that is going to be a bed's, and as little of a system around it as can be.
#
#   install.sh ROOT PYTHON SITE SOURCE
#
# ROOT: a view of this machine's files that may be written to, with an empty /run. PYTHON: prefix of the interpreter.
# SITE: its site-packages with what the daemon needs. SOURCE: this repository. Paths are those of who calls.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=${1%/} python=$2 site=$3 source=$4

# --- the daemon, where the unit expects it ------------------------------------------------------------------------------

# What `python -m venv` and `pip install` would make, without their seconds. ProtectHome= hides an interpreter in /root.
opt=$root/opt/spooled-supervisor
version=$(basename "$(dirname "$site")") # python3.11
mkdir -p "$opt/venv/bin" "$opt/venv/lib/$version/site-packages" "$opt"/{python,site,source}
for bound in "$python:python" "$site:site"; do
    mount --bind "${bound%:*}" "$opt/${bound##*:}"
    mount -o remount,bind,ro "$opt/${bound##*:}"
done
mkdir "$opt/source/tests"
cp --archive "$source"/{spooled_supervisor,systemd,pyproject.toml} "$opt/source/" # a copy: whoever edits disturbs no test
cp --archive "$source"/tests/{conftest.py,support,systemd} "$opt/source/tests/"
printf '%s\n' 'home = /opt/spooled-supervisor/python/bin' 'include-system-site-packages = false' >"$opt/venv/pyvenv.cfg"
ln -s "../../python/bin/$version" "$opt/venv/bin/python"
printf '%s\n' /opt/spooled-supervisor/site /opt/spooled-supervisor/source \
    >"$opt/venv/lib/$version/site-packages/bed.pth"
printf '%s\n' '#!/opt/spooled-supervisor/venv/bin/python' 'from spooled_supervisor.cli import main' 'main()' \
    >"$opt/venv/bin/spooled-supervisor"
chmod 0755 "$opt/venv/bin/spooled-supervisor"
mkdir -p "$root/etc/spooled"
cp "$opt/source/systemd/spooled-supervisor.service" "$root/etc/systemd/system/"
chmod 0644 "$root/etc/systemd/system/spooled-supervisor.service"

# --- as little of a system as there can be ------------------------------------------------------------------------------

# A target of our own, and nothing of what this machine or systemd itself would start before any service: that touches
# hardware, the kernel, or files of the machine outside, or only takes time.
mkdir -p "$root"/run/systemd/{system,journald.conf.d}
cat >"$root/run/systemd/system/bed.target" <<'UNIT'
[Unit]
Description=The test bed is up
Requires=systemd-journald.service sysinit.target dbus.socket
After=systemd-journald.service sysinit.target dbus.socket
UNIT
cat >"$root/run/systemd/journald.conf.d/bed.conf" <<'JOURNAL'
[Journal]
Storage=volatile
RateLimitIntervalSec=0
Audit=no
JOURNAL
for emptied in {lib,etc}/systemd/system/sysinit.target.wants lib/systemd/system-generators; do
    mkdir -p "$root/$emptied"
    mount -t tmpfs -o size=1m bed "$root/$emptied"
done
for unit in systemd-journald-audit.socket tmp.mount; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done
