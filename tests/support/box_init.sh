#!/bin/sh
# Runs as the first process of a box's namespaces: gives it /proc, /dev, /run of its own, makes
# ROOT the root, and becomes systemd. Called with ROOT; the mounts vanish with the namespace.
set -eu
R=$1
mount --make-rprivate /
hostname box
ip link set lo up 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs "$R/run"
mount -t tmpfs -o mode=1777 tmpfs "$R/tmp"
mount -t proc proc "$R/proc"
mount -t sysfs -o ro sysfs "$R/sys"
mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
# Device nodes may be made in here without changing the machine's own /dev.
mount -t tmpfs -o mode=755,size=16m tmpfs "$R/dev"
node() { mknod -m "$2" "$R/dev/$1" c "$3" "$4"; }
node null 666 1 3; node zero 666 1 5; node full 666 1 7; node random 666 1 8
node urandom 666 1 9; node tty 666 5 0; node kmsg 600 1 11
node console 600 1 3  # nobody looks at it
mkdir "$R/dev/pts" "$R/dev/shm" "$R/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$R/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
ln -s pts/ptmx "$R/dev/ptmx"
ln -s /proc/self/fd "$R/dev/fd"
for number in 0 1 2; do
    case $number in 0) name=stdin ;; 1) name=stdout ;; *) name=stderr ;; esac
    ln -s "/proc/self/fd/$number" "$R/dev/$name"
done
# pivot_root rather than chroot: units make mount namespaces of their own.
cd "$R"
pivot_root . .
umount -l .
cd /
exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=multi-user.target \
    --log-target=journal-or-kmsg --show-status=no
