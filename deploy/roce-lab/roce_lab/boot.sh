#!/bin/busybox sh
# The guest's first process. It mounts the machine's own file system, read-only, under an overlay that forgets, and
# runs the agent in it; when the agent ends, so does the guest.
B=/bin/busybox
fail() { echo "lab: $*"; $B poweroff -f; }

$B mkdir -p /proc /sys /dev /lab /ro /rw /fresh /new
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
while read -r m; do
  $B insmod "/modules/$m" || echo "lab: cannot load $m"
done < /modules/order

P=trans=virtio,version=9p2000.L,msize=524288
$B mount -t 9p -o $P,cache=none lab /lab || fail "no shared folder"
. /lab/.guest/settings

# What is there at start is taken to stay as it is, which is what makes it fast ...
$B mount -t 9p -o $P,ro,cache=loose host /ro || fail "no file system of the host"
$B mount -t tmpfs -o size=90% rw /rw
$B mkdir -p /rw/u /rw/w /rw/pu /rw/pw
$B mount -t overlay -o lowerdir=/ro,upperdir=/rw/u,workdir=/rw/w root /new || fail "no overlay"
# ... but the project may be edited while the guest runs (its virtual environment not).
if [ -d "/new$PROJECT/.venv" ]; then
  $B mkdir -p /venv
  $B mount --bind "/new$PROJECT/.venv" /venv
fi
$B mount -t 9p -o $P,ro,cache=mmap project /fresh || fail "no project folder"
$B mount -t overlay -o lowerdir=/fresh,upperdir=/rw/pu,workdir=/rw/pw project "/new$PROJECT" || fail "no overlay of the project"
[ -d /venv ] && $B mount --bind /venv "/new$PROJECT/.venv"

$B mount -t proc proc /new/proc
$B mount -t sysfs sys /new/sys
$B mount -t devtmpfs dev /new/dev
$B mkdir -p /new/dev/shm /new/dev/pts /new/tmp/lab /new/run/lab-tmp
$B mount -t devpts devpts /new/dev/pts
$B mount -t tmpfs shm /new/dev/shm
$B mount -t tmpfs tmp /new/run/lab-tmp
$B mount --bind /lab /new/tmp/lab

$B chroot /new "$PYTHON" -I -S "$AGENT"
echo "lab: the agent ended with status $?"
$B poweroff -f
