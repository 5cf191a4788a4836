#!/bin/busybox sh
# The first program in the virtual machine: builds a root directory out of the files of the machine outside, installs
# the daemon there, and becomes systemd. vm.py says what for.
#
# /settings, lines for the shell: PYTHON, SITE and SOURCE as in install.sh, and TESTS, the script of what is to be run.
set -eu
export PATH=/bin
/bin/busybox --install -s /bin

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
    insmod "$module"
done
# shellcheck source=/dev/null
. /settings

# Nobody outside writes there meanwhile, or it does not matter: what was read once is remembered (cache=loose).
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro outside /outside
mount -t tmpfs -o mode=0755 memory /memory
mkdir /memory/written /memory/work
mount -t overlay -o lowerdir=/outside,upperdir=/memory/written,workdir=/memory/work bed /root
rm -f /root/.dockerenv # systemd takes it for a container's
mount --move /dev /root/dev
mount -t tmpfs -o mode=0755,nosuid,nodev run /root/run

chroot /root /bin/bash "$SOURCE/tests/systemd/install.sh" / "$PYTHON" "$SITE" "$SOURCE"
mount -t tmpfs -o mode=1777,nosuid,nodev tmp /root/tmp
printf '%s\n' "$TESTS" >/root/run/tests.sh
cat >/root/run/systemd/system/tests.service <<'UNIT'
[Unit]
Description=The tests
[Service]
Type=oneshot
ExecStart=/bin/sh /run/tests.sh
ExecStopPost=/bin/systemctl poweroff --force --force
StandardOutput=file:/dev/ttyS0
StandardError=inherit
UNIT
mkdir /root/run/systemd/system/bed.target.wants
ln -s ../tests.service /root/run/systemd/system/bed.target.wants/

exec switch_root /root /lib/systemd/systemd --unit=bed.target --show-status=no
