#!/bin/bash
# The part of the test bed that has to happen before systemd is there; bed.py starts it and says what it is for.
#
#   bed.sh start SCRATCH FLAVOUR PYTHON SITE SOURCE CGROUP...   joins the cgroups, makes the namespaces
#   bed.sh inside SCRATCH FLAVOUR PYTHON SITE SOURCE            builds the root directory, becomes systemd
#
# SCRATCH: an empty directory. FLAVOUR: `unified` (cgroup v2 alone) or `hybrid` (v1 controllers, v2 beside them).
# PYTHON: prefix of the interpreter. SITE: its site-packages with what the daemon needs. SOURCE: this repository.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin
step=$1 scratch=$2 flavour=$3 python=$4 site=$5 source=$6
shift 6

if [[ $step == start ]]; then
    for cgroup in "$@"; do
        echo $$ >"$cgroup/cgroup.procs"
    done
    # --kill-child: whoever kills unshare, kills the whole bed
    exec unshare --fork --kill-child --pid --mount --uts --ipc --net --cgroup --propagation private \
        bash "$0" inside "$scratch" "$flavour" "$python" "$site" "$source"
fi

# --- the root: this machine's files, and whatever is written stays in memory ---------------------------------------------

mount -t tmpfs -o size=1g,mode=0755 bed "$scratch"
mkdir "$scratch"/{written,work,root}
root=$scratch/root
mount -t overlay -o "lowerdir=/,upperdir=$scratch/written,workdir=$scratch/work" bed "$root"

# Kernel settings are shared with the machine outside, so nobody writes them from in here.
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
for shared in sys sysrq-trigger irq bus; do
    if [[ -e $root/proc/$shared ]]; then
        mount --bind "$root/proc/$shared" "$root/proc/$shared"
        mount -o remount,bind,ro "$root/proc/$shared"
    fi
done
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"

mount -t tmpfs -o mode=0755,nosuid,size=1m bed "$root/dev"
for device in null zero full random urandom tty; do
    cp --archive "/dev/$device" "$root/dev/"
done
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev bed "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do
    ln -s "fd/${number%:*}" "$root/dev/${number#*:}"
done

for empty in run tmp; do
    mount -t tmpfs -o nosuid,nodev bed "$root/$empty"
done
chmod 0755 "$root/run"
chmod 1777 "$root/tmp"

if [[ $flavour == unified ]]; then
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs -o mode=0755,nosuid,nodev,noexec bed "$root/sys/fs/cgroup"
    while read -r controller hierarchy _; do
        if [[ $controller != \#* && $hierarchy != 0 ]]; then
            mkdir "$root/sys/fs/cgroup/$controller"
            # one that v2 has cannot be had as v1 as well
            mount -t cgroup -o "$controller" cgroup "$root/sys/fs/cgroup/$controller" 2>/dev/null ||
                rmdir "$root/sys/fs/cgroup/$controller"
        fi
    done </proc/cgroups
    mkdir "$root"/sys/fs/cgroup/{systemd,unified}
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
fi

# --- the unit, the daemon, and little else ------------------------------------------------------------------------------

bash "$source/tests/systemd/install.sh" "$root" "$python" "$site" "$source"

# --- and go -------------------------------------------------------------------------------------------------------------

cd "$root"
mkdir run/outside
pivot_root . run/outside
umount --lazy /run/outside
rmdir /run/outside
mount --make-rshared / # without it LoadCredential= gives an empty directory; outside of containers systemd does it
exec setpriv --bounding-set=-sys_module,-sys_boot,-sys_time,-sys_rawio,-syslog,-wake_alarm \
    env -i container=spooled-bed PATH=$PATH LANG=C.UTF-8 \
    /lib/systemd/systemd --system --unit=bed.target --show-status=no --log-target=journal
