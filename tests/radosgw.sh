#!/bin/bash
# A real S3 server for the tests: one-node Ceph radosgw on loopback, ready in about two seconds.
#
#   radosgw.sh DIR PORT ACCESS_KEY SECRET_KEY [memstore|bluestore]
#
# Debian 12: apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd
# Uses PORT (S3), PORT+1 (monitor) and free ports from 6800 up, on 127.0.0.1 only. Prints "ready"
# and stays in the foreground; SIGTERM stops all of it, and so does the death of this script.
# With memstore (the default) objects live in memory and are gone afterwards. With bluestore they
# are in DIR and survive kill -9: the same command again goes on with them.
set -euo pipefail
dir=$1 port=$2 access_key=$3 secret_key=$4 objects=${5:-memstore}
mkdir -p "$dir"/{mon,osd,run,rgw,log}
again=
[[ -e $dir/made ]] && again=yes
fsid=$(cat /proc/sys/kernel/random/uuid)
[[ $again ]] || cat > "$dir/ceph.conf" <<CONF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$((port + 1))/0]
ms bind msgr1 = false
paxos propose interval = 0.05
paxos min wait = 0.01
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
run dir = $dir/run
admin socket =
log file = $dir/log/\$name.log
pid file =
keyring = $dir/keyring
[mon.a]
mon data = $dir/mon
mon data avail crit = 1
[osd.0]
osd data = $dir/osd
osd objectstore = $objects
memstore device bytes = 2147483648
bluestore block size = 10737418240
bluestore block create = true
bluestore fsck on mount = false
osd memory target = 939524096
osd class load list = *
osd class default list = *
[client.rgw]
rgw data = $dir/rgw
rgw frontends = beast endpoint=127.0.0.1:$port
rgw thread pool size = 64
rgw enable usage log = false
ms mon client mode = crc
CONF
export CEPH_CONF=$dir/ceph.conf

started=()
stop() {
  trap - EXIT
  kill -KILL "${started[@]}" 2> /dev/null || true
  wait # or the daemons stay behind as zombies where nobody reaps them
}
trap stop EXIT
trap 'exit 0' TERM INT
start() { # NAME COMMAND...: a daemon that dies with this script
  local name=$1
  shift
  setpriv --pdeathsig KILL "$@" > "$dir/log/$name.out" 2>&1 &
  started+=($!)
}
wait_for() { # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@" 2>/dev/null; do
    ((SECONDS < end)) || { echo "gave up waiting for: $*" >&2; exit 1; }
    sleep 0.1
  done
}
osd_is_up() { ceph -c "$CEPH_CONF" osd stat | grep -q ' 1 up'; }
s3_answers() { (exec 3<> "/dev/tcp/127.0.0.1/$port"); }

make_mon() {
  local who new
  for who in mon. client.admin client.rgw; do
    new=(--gen-key)
    [[ $who == mon. ]] && new=(--create-keyring --gen-key)
    ceph-authtool "$dir/keyring" "${new[@]}" -n "$who" \
      --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' > /dev/null
  done
  monmaptool --create --clobber --addv a "[v2:127.0.0.1:$((port + 1))]" --fsid "$fsid" \
    "$dir/monmap" > /dev/null
  ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
}
make_osd() {
  local osd_uuid
  osd_uuid=$(cat /proc/sys/kernel/random/uuid)
  ceph osd new "$osd_uuid" > /dev/null
  ceph-osd -i 0 --mkfs --osd-uuid "$osd_uuid" > "$dir/log/osd-mkfs.out" 2>&1
}

[[ $again ]] || make_mon
start mon ceph-mon -i a -f
[[ $again ]] || make_osd
start osd ceph-osd -i 0 -f
wait_for 20 osd_is_up

start rgw radosgw -n client.rgw -f
[[ $again ]] || radosgw-admin user create --uid=test --display-name=test \
  --access-key="$access_key" --secret-key="$secret_key" \
  > "$dir/user.json" 2> "$dir/log/user.err"
wait_for 60 s3_answers
touch "$dir/made"
echo ready
wait
