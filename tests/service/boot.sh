#!/bin/sh
# Boots a systemd in namespaces of its own, on a throw-away copy of this machine's root: an overlay whose changes are in
# memory. Called by service_machine.py as: unshare --fork --pid --mount --cgroup --uts --ipc --net --kill-child boot.sh FOLDER
#
# What it may not touch is out of its reach before it starts: the root's files (overlay), temporary folders and /dev/shm
# (private), kernel settings (read-only), clock, modules and raw devices (no capability).
set -eu
folder=$1
mount --make-rprivate /
mount -t tmpfs -o size=1g,mode=755 scratch "$folder"
mkdir "$folder/upper" "$folder/work" "$folder/root"
root=$folder/root
mount -t overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" overlay "$root"

for private in tmp run var/tmp dev home; do
    mount -t tmpfs -o mode=755,size=1g private "$root/$private"
done
chmod 1777 "$root/tmp" "$root/var/tmp"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts" "$root/run/lock"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"

# Of what a boot brings up only the journal and the bus are wanted.
units=$root/etc/systemd/system
for wanted in sysinit local-fs basic multi-user timers sockets network; do
    for link in "$root/usr/lib/systemd/system/$wanted.target.wants"/* "$units/$wanted.target.wants"/*; do
        name=${link##*/}
        case $name in
            *journald*.socket | systemd-journald.service | dbus.* | "*") ;;
            *) ln -sf /dev/null "$units/$name" ;;
        esac
    done
done
printf '[Unit]\nRequires=basic.target dbus.service\nAfter=basic.target dbus.service\n' > "$units/test.target"
ln -sf /dev/null "$units/systemd-remount-fs.service"
: > "$root/etc/fstab"
mkdir -p "$root/etc/systemd/journald.conf.d"
printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' > "$root/etc/systemd/journald.conf.d/test.conf"
rm -f "$root/etc/machine-id" && echo 0123456789abcdef0123456789abcdef > "$root/etc/machine-id"

cd "$root"
mkdir -p run/old
pivot_root . run/old
umount -l /run/old
exec /usr/bin/env -i container=pingpong-test PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio,-syslog,-audit_control \
    /lib/systemd/systemd --unit=test.target --log-target=journal --show-status=no
